// The module tree and the panel beside it.

function moduleTree() {
  const root = {kind: 'module', name: report.title || 'model', path: '', modules: new Map(), weights: [], operators: []};
  const at = path => {
    let node = root;
    if (!path) return node;
    const parts = path.split('.');
    parts.forEach((part, n) => {
      if (!node.modules.has(part)) {
        node.modules.set(part, {
          kind: 'module', name: part, path: parts.slice(0, n + 1).join('.'), modules: new Map(), weights: [], operators: [],
        });
      }
      node = node.modules.get(part);
    });
    return node;
  };
  for (const operator of report.operators) at(operator.module).operators.push(operator);
  for (const tensor of report.tensors) if (tensor.kind === 'weight') at(tensor.module).weights.push(tensor);
  measure(root);
  return root;
}

// Sums the bytes and times of a module and the modules in it, and finds its first operator.
function measure(node) {
  const total = {bytes: 0, compute: 0, resharding: 0, first: Infinity};
  for (const child of node.modules.values()) {
    const inner = measure(child);
    total.bytes += inner.bytes; total.compute += inner.compute; total.resharding += inner.resharding;
    total.first = Math.min(total.first, inner.first);
  }
  total.bytes += sum(node.weights, weight => weight.shard_nbytes);
  for (const operator of node.operators) {
    total.compute += operator.compute_seconds;
    total.resharding += operator.reduce_seconds + operator.conversion_seconds;
    total.first = Math.min(total.first, operator.index);
  }
  node.total = total;
  return total;
}

// The children of a row: a module's weights, then its modules in execution order, equal layers as one, then operators.
function childrenOf(node) {
  if (node.kind === 'group') return childrenOf(node.members[0]);
  if (node.kind === 'operators') return node.operators.map(operator => ({kind: 'operator', operator}));
  if (node.kind === 'inputs') return node.tensors.map(tensor => ({kind: 'tensor', tensor}));
  if (node.kind !== 'module') return [];
  const family = families.get(node.path);
  // The set of layers with equal plans that each layer is in; the usual set has no differences.
  const setOfLayer = new Map();
  const sets = family ? [{members: family.usual, differences: null}, ...family.variants] : [];
  for (const set of sets) for (const member of set.members) setOfLayer.set(member, set);
  const modules = [...node.modules.values()].sort((a, b) => a.total.first - b.total.first);
  const children = node.weights.map(tensor => ({kind: 'tensor', tensor, short: true}));
  if (!node.path) {
    const inputs = report.tensors.filter(tensor => tensor.kind === 'input');
    if (inputs.length) children.push({kind: 'inputs', name: 'inputs', tensors: inputs});
  }
  for (let n = 0; n < modules.length;) {
    let end = n + 1;
    const setOf = module => setOfLayer.get(Number(module.name));
    const set = setOf(modules[n]);
    if (set) while (end < modules.length && setOf(modules[end]) === set) end += 1;
    const variant = set && set.differences ? set : null;
    if (end - n > 1) {
      const members = modules.slice(n, end);
      children.push({kind: 'group', name: `${members[0].name} to ${members[end - n - 1].name}`, members, variant});
    } else {
      modules[n].variant = variant;
      children.push(modules[n]);
    }
    n = end;
  }
  if (node.operators.length) {
    children.push({kind: 'operators', name: count(node.operators.length, 'operator'), operators: node.operators});
  }
  return children;
}

function rowText(node) {
  if (node.kind === 'tensor') {
    const {tensor} = node;
    const name = node.short && tensor.module ? nameOf(tensor).slice(tensor.module.length + 1) : nameOf(tensor);
    return {
      name, what: `${tensor.dtype} ${shapeText(tensor)}`, spec: specChip(tensor), bytes: bytes(tensor.shard_nbytes), time: '',
      label: `${tensor.kind} ${name}, ${shapeText(tensor)}, ${specWords(tensor.spec)}, ${bytes(tensor.shard_nbytes)} a device`,
    };
  }
  if (node.kind === 'operator') {
    const {operator} = node;
    const output = tensors.get(operator.outputs[0]);
    const seconds = operator.compute_seconds + operator.reduce_seconds + operator.conversion_seconds;
    const collectives = (communicationsAt.get(operator.index) || []).map(one => one.kind);
    return {
      name: `${operator.index} ${operator.kind}`,
      what: [operator.label.slice(operator.module.length && operator.label.startsWith(operator.module) ? operator.module.length + 1 : 0),
        collectives.join(', ')].filter(Boolean).join(' · '),
      spec: specChip(output), bytes: '', time: time(seconds),
      label: `operator ${operatorName(operator)}, output ${specWords(output.spec)}, ${time(seconds)}`
        + (collectives.length ? `, ${collectives.join(', ')}` : ''),
    };
  }
  if (node.kind === 'inputs' || node.kind === 'operators') {
    const seconds = node.kind === 'operators' ? time(sum(node.operators, one => one.compute_seconds + one.reduce_seconds + one.conversion_seconds)) : '';
    const size = node.kind === 'inputs' ? bytes(sum(node.tensors, one => one.shard_nbytes)) : '';
    return {name: node.name, what: '', spec: '', bytes: size, time: seconds, label: node.name};
  }
  const members = node.kind === 'group' ? node.members : [node];
  const total = {
    bytes: sum(members, one => one.total.bytes), compute: sum(members, one => one.total.compute),
    resharding: sum(members, one => one.total.resharding),
  };
  const seconds = total.compute + total.resharding;
  const badge = [
    node.kind === 'group' ? el('span', {class: 'badge quiet'}, `${members.length} alike`) : '',
    node.variant ? el('span', {class: 'badge'}, members.length > 1 ? 'differ' : 'differs') : '',
  ];
  const share = total.resharding ? `${percent(total.resharding / seconds)} resharding` : '';
  return {
    name: node.name, badge, what: node.variant ? node.variant.differences[0] : share, spec: '',
    bytes: total.bytes ? bytes(total.bytes) : '', time: seconds ? time(seconds) : '',
    label: `${node.name}${node.kind === 'group' ? `, ${members.length} layers planned alike` : ''}`
      + `${node.variant ? `, differs: ${node.variant.differences.join('; ')}` : ''}, ${bytes(total.bytes)} a device, ${time(seconds)}`,
  };
}

// A tree view by the ARIA Authoring Practices: one row is in the tab order; arrow keys move, open and close.
function drawModel() {
  const root = moduleTree();
  const tree = el('div', {role: 'tree', 'aria-label': 'Modules', class: 'tree', onkeydown: onKey, onclick: onClick});
  const panel = el('aside', {class: 'panel', 'aria-label': 'Details'});
  let rows = [];
  let current = null;

  function makeRow(node, level, position, size) {
    const text = rowText(node);
    const isOpen = childrenOf(node).length ? false : null;
    const row = {node, level, open: isOpen};
    row.element = el('div', {
      role: 'treeitem', 'aria-level': level, 'aria-posinset': position, 'aria-setsize': size, tabindex: '-1',
      'aria-expanded': isOpen === null ? null : 'false', 'aria-selected': 'false', 'aria-label': text.label,
      class: `row ${node.kind}`, style: {'--level': String(level)},
    },
    el('span', {class: 'name'}, el('span', {class: 'twist', 'aria-hidden': 'true'}), el('span', {class: 'text', title: text.name}, text.name), text.badge || ''),
    el('span', {class: 'what', title: text.what}, text.what), el('span', {class: 'where'}, text.spec),
    el('span', {class: 'bytes'}, text.bytes), el('span', {class: 'time'}, text.time));
    row.element.row = row;
    return row;
  }

  function open(row) {
    if (row.open !== false) return;
    const children = childrenOf(row.node);
    const made = children.map((child, n) => makeRow(child, row.level + 1, n + 1, children.length));
    rows.splice(rows.indexOf(row) + 1, 0, ...made);
    row.element.after(...made.map(one => one.element));
    row.open = true;
    row.element.setAttribute('aria-expanded', 'true');
  }

  function close(row) {
    if (row.open !== true) return;
    const first = rows.indexOf(row) + 1;
    let end = first;
    while (end < rows.length && rows[end].level > row.level) end += 1;
    const holds = rows.slice(first, end).includes(current);
    rows.splice(first, end - first).forEach(gone => gone.element.remove());
    row.open = false;
    row.element.setAttribute('aria-expanded', 'false');
    if (holds) select(row, true);
  }

  function select(row, focuses) {
    if (current) {
      current.element.setAttribute('aria-selected', 'false');
      current.element.setAttribute('tabindex', '-1');
    }
    current = row;
    row.element.setAttribute('aria-selected', 'true');
    row.element.setAttribute('tabindex', '0');
    if (focuses) row.element.focus();
    panel.replaceChildren(...details(row.node).filter(Boolean));
  }

  function onClick(event) {
    const element = event.target.closest('[role=treeitem]');
    if (!element) return;
    select(element.row, true);
    if (event.target.closest('.name')) (element.row.open ? close : open)(element.row);
  }

  function onKey(event) {
    if (!current || event.altKey || event.ctrlKey || event.metaKey) return;
    const place = rows.indexOf(current);
    const goes = {ArrowDown: place + 1, ArrowUp: place - 1, Home: 0, End: rows.length - 1}[event.key];
    if (goes !== undefined) {
      if (rows[goes]) select(rows[goes], true);
    } else if (event.key === 'ArrowRight') {
      if (current.open === false) open(current);
      else if (current.open && rows[place + 1]) select(rows[place + 1], true);
    } else if (event.key === 'ArrowLeft') {
      if (current.open) close(current);
      else {
        const above = rows.slice(0, place).reverse().find(row => row.level < current.level);
        if (above) select(above, true);
      }
    } else if (event.key === 'Enter' || event.key === ' ') (current.open ? close : open)(current);
    else return;
    event.preventDefault();
  }

  const top = makeRow(root, 1, 1, 1);
  rows = [top];
  tree.append(top.element);
  open(top);
  select(top, false);
  // The modules that contain layers are open at first, since most users look for layers.
  const isAbove = path => [...families.keys()].some(prefix => prefix === path || prefix.startsWith(`${path}.`));
  for (let n = 1; n < rows.length; n += 1) {
    const {node} = rows[n];
    if (node.kind === 'module' && isAbove(node.path) && !/\.\d+(\.|$)/.test(node.path)) open(rows[n]);
  }
  const head = el('div', {class: 'row head', 'aria-hidden': 'true'}, ['module, weight or operator', '', 'sharding', 'per device', 'predicted']
    .map(text => el('span', {}, text)));
  // Opens the modules that contain a tensor, and selects its row.
  showTensor = tensor => {
    const path = tensor.module ? tensor.module.split('.') : [];
    let row = top;
    for (let n = 0; n <= path.length; n += 1) {
      open(row);
      if (n === path.length) break;
      const prefix = path.slice(0, n + 1).join('.');
      const next = rows.slice(rows.indexOf(row) + 1).find(one => one.level === row.level + 1
        && (one.node.path === prefix || (one.node.kind === 'group' && one.node.members.some(member => member.path === prefix))));
      if (!next) break;
      row = next;
    }
    const tensorRow = rows.slice(rows.indexOf(row) + 1)
      .find(one => one.node.kind === 'tensor' && patternOf(nameOf(one.node.tensor)) === patternOf(nameOf(tensor)));
    select(tensorRow || row, true);
    if (tensorRow && tensorRow.node.tensor !== tensor) panel.replaceChildren(...tensorDetails(tensor));
    document.getElementById('model').scrollIntoView();
  };
  replaceBody('model',
    el('p', {class: 'lead'}, `Weights, operators and their sharding on ${meshText()}. `,
      'Arrow keys move, open and close; layers that are planned alike are shown once.'),
    el('div', {class: 'split'}, el('div', {class: 'tree-box'}, head, tree), panel));
}

let showTensor = () => {};

function details(node) {
  if (node.kind === 'tensor') return tensorDetails(node.tensor);
  if (node.kind === 'operator') return operatorDetails(node.operator);
  const members = node.kind === 'group' ? node.members : [node];
  if (node.kind === 'inputs') return [el('h3', {}, 'Inputs'), el('p', {}, 'The inputs of the graph.')];
  if (node.kind === 'operators') return [el('h3', {}, 'Operators'), el('p', {}, 'Operators of this module that belong to none of its submodules.')];
  const seconds = sum(members, one => one.total.compute + one.total.resharding);
  const sent = sum(members, one => one.total.resharding);
  return [
    el('h3', {}, members.length > 1 ? `${members[0].path} to ${members[members.length - 1].path}` : node.path || node.name),
    members.length > 1 ? el('p', {}, `${members.length} layers that are planned alike. The entries below are those of ${members[0].path}.`) : null,
    node.variant ? el('div', {}, el('p', {}, 'Differs from most layers of its kind:'),
      el('ul', {}, node.variant.differences.map(text => el('li', {}, text)))) : null,
    facts([
      ['Weights per device', bytes(sum(members, one => one.total.bytes))],
      ['Predicted', time(seconds)],
      ['of that, resharding', seconds ? `${time(sent)} (${percent(sent / seconds)})` : '0 s'],
    ]),
    node.path ? null : el('div', {}, el('h4', {}, 'The mesh'), legend()),
  ];
}

function facts(pairs) {
  return el('dl', {class: 'facts'}, pairs.filter(Boolean).map(([name, value]) => [el('dt', {}, name), el('dd', {}, value)]));
}

function legend() {
  return el('ul', {class: 'legend'},
    report.mesh_axes.map((axis, n) => el('li', {}, el('span', {class: 'swatch', style: {background: `var(--axis${n % 4})`}}),
      `S${n}: split over ${axis}, ${report.mesh_shape[n]} ${report.mesh_shape[n] === 1 ? 'device' : 'devices'}`)),
    el('li', {}, el('span', {class: 'swatch', style: {background: 'var(--whole)'}}), 'R: whole on every device'));
}

function tensorDetails(tensor) {
  const producer = producers.get(tensor.name);
  const read = (consumers.get(tensor.name) || []);
  const pattern = patternOf(nameOf(tensor));
  const alike = tensor.kind === 'weight' && tensor.label ? report.tensors.filter(one => one.kind === 'weight' && patternOf(nameOf(one)) === pattern) : [];
  return [
    el('h3', {}, nameOf(tensor)),
    el('p', {class: 'quiet'}, `${tensor.kind} ${tensor.name}: ${tensor.dtype} ${shapeText(tensor)}`),
    meshDrawing(tensor, tensor.spec),
    facts([
      ['Whole', bytes(tensor.nbytes)],
      ['A device holds', `${bytes(tensor.shard_nbytes)}, [${tensor.shard_shape.join(', ')}]`],
      producer ? ['Computed by', operatorName(producer)] : null,
      read.length ? ['Read by', read.slice(0, 4).map(operatorName).join(', ') + (read.length > 4 ? ` and ${read.length - 4} more` : '')] : null,
      alike.length > 1 ? ['Layers', `one of ${alike.length} named ${pattern}`] : null,
    ]),
    tensor.kind === 'weight' ? alternativesOf(tensor) : null,
    tensor.kind === 'weight' && live ? pinForm(tensor) : null,
  ].filter(Boolean);
}

function peakWith(extra) {
  return peakBytes() + extra;
}

const peakBytes = () => report.memory.held_bytes.reduce((peak, held) => Math.max(peak, held), 0);

function shardBytes(tensor, specText) {
  const itemsize = tensor.nbytes / tensor.shape.reduce((a, b) => a * b, 1);
  return parseSpec(specText).reduce((size, axes, dim) => size * Math.ceil(tensor.shape[dim] / groupSize(axes)), itemsize);
}

// Seconds that a change adds to the plan; 0 if its lower bound is below the plan's time, as the search's gap permits.
function added(choice) {
  const least = choice.at_least_seconds;
  return least === null ? choice.alone_seconds - report.seconds : Math.max(0, least - report.seconds);
}

function addedText(choice) {
  const seconds = added(choice);
  const exact = choice.at_least_seconds !== null;
  return isSame(seconds, report.seconds) ? 'no time' : `${exact ? '' : 'up to '}${more(seconds, time)} (${more(seconds / report.seconds, percent)})`;
}

function fitText(extra) {
  const over = peakWith(extra) - report.memory.budget_bytes;
  return over > 0 ? `is over the budget by ${bytes(over)}, unless other tensors are split more` : 'fits the budget';
}

function alternativesOf(weight) {
  if (!weight.alternatives.length) {
    return el('p', {class: 'quiet'}, report.search ? 'It has no other spec on this mesh.' : 'The plan was not searched: no alternatives are known.');
  }
  const choices = [...weight.alternatives].sort((a, b) => added(a) - added(b));
  return el('div', {class: 'alternatives'}, el('h4', {}, 'What another sharding would cost'),
    scrolling('The best plans with another sharding of this weight, whatever memory they need',
      el('thead', {}, el('tr', {}, ['stored as', 'time per run', 'memory per device', ''].map(text => el('th', {scope: 'col'}, text)))),
      el('tbody', {}, choices.map(choice => {
        const extra = shardBytes(weight, choice.spec) - weight.shard_nbytes;
        return el('tr', {}, el('th', {scope: 'row'}, specChip(weight, choice.spec)), el('td', {}, addedText(choice)),
          el('td', {}, more(extra, bytes)), el('td', {}, extra > 0 ? fitText(extra) : ''));
      }))));
}

function operatorDetails(operator) {
  const communications = communicationsAt.get(operator.index) || [];
  const seconds = operator.compute_seconds + operator.reduce_seconds + operator.conversion_seconds;
  const second = operator.runner_up;
  const [before] = operator.spec.split('|');
  const specs = before.match(/\([^()]*\)/g) || [];
  return [
    el('h3', {}, operatorName(operator)),
    operator.module ? el('p', {class: 'quiet'}, `in ${operator.module}`) : null,
    facts([
      ['Predicted', time(seconds)],
      ['Kernel', time(operator.compute_seconds)],
      ['Converting inputs', time(operator.conversion_seconds)],
      ['Reducing results', time(operator.reduce_seconds)],
      operator.note ? ['Note', operator.note] : null,
      second ? ['Next best', [`${addedText(second)} as `, el('code', {}, second.spec)]] : null,
    ]),
    el('h4', {}, 'Reads'),
    ...operator.inputs.map((name, n) => meshRow(tensors.get(name), specs[n] || tensors.get(name).spec)),
    el('h4', {}, 'Computes'),
    ...operator.outputs.map(name => meshDrawing(tensors.get(name), tensors.get(name).spec)),
    communications.length ? el('div', {}, el('h4', {}, 'Communication'), communications.map(communicationDetails)) : null,
  ];
}

const meshRow = (tensor, spec) => el('p', {class: 'read'}, specChip(tensor, spec), ` ${nameOf(tensor)} `,
  el('span', {class: 'quiet'}, shapeText(tensor)));

function pinForm(weight) {
  // The report on a plan with a pinned weight has no alternatives of that weight.
  const base = first.tensors.find(one => one.name === weight.name) || weight;
  const options = [base.spec, ...base.alternatives.map(choice => choice.spec)];
  const pinned = pins.get(nameOf(weight));
  const group = el('fieldset', {}, el('legend', {}, 'Pin and search again'),
    options.map(spec => el('label', {}, el('input', {type: 'radio', name: 'pin', value: spec, checked: pinned ? spec === pinned : spec === weight.spec}), specChip(weight, spec))));
  return el('form', {class: 'pin', onsubmit: event => {
    event.preventDefault();
    const chosen = new FormData(event.target).get('pin');
    searchAgain(new Map(wanted).set(nameOf(weight), chosen));
  }}, group, el('button', {type: 'submit'}, 'Search with this pin'));
}
