// The state of the page, its header and answers, the search and operator sections, and pins.

const given = JSON.parse(document.getElementById('data').textContent);
const {live} = given;
let report, tensors, producers, consumers, communicationsAt, families;
let traces = given.traces.map(unpack);
let pins = new Map();
let wanted = pins;  // the pins of the latest search that was asked for; pins are those of the plan that is shown
let searches = 0;
let first = null;  // the report without pins from this page

function take(packed) {
  report = unpack(packed);
  first = first || report;
  tensors = new Map(report.tensors.map(tensor => [tensor.name, tensor]));
  producers = new Map();
  consumers = new Map();
  communicationsAt = new Map();
  families = new Map(report.families.map(family => [family.prefix, family]));
  const add = (map, key, value) => { if (map.has(key)) map.get(key).push(value); else map.set(key, [value]); };
  for (const operator of report.operators) {
    for (const name of operator.outputs) producers.set(name, operator);
    for (const name of new Set(operator.inputs)) add(consumers, name, operator);
  }
  for (const one of report.communications) if (one.operator !== null) add(communicationsAt, one.operator, one);
}

// The shares of an uneven axis, by which it splits dims; shards are drawn as if they were equal.
const sharesText = axis => {
  const shares = (report.mesh_shares || [])[axis] || [];
  return shares.length ? ` in shares of ${shares.join(' : ')}` : '';
};

const meshText = () => `${deviceCount()} ${deviceCount() === 1 ? 'device' : 'devices'}, ${report.mesh_axes.map((axis, n) => `${axis} ${report.mesh_shape[n]}${sharesText(n)}`).join(' × ')}`;

const link = (section, text) => el('a', {href: `#${section}`}, text);

function figure(name, value, note) {
  return el('div', {class: 'figure'}, el('dt', {}, name), el('dd', {}, value), note ? el('dd', {class: 'note'}, note) : null);
}

function drawTop() {
  const peak = peakBytes();
  const sent = sum(report.communications, one => one.seconds);
  const weights = sum(report.tensors.filter(tensor => tensor.kind === 'weight'), one => one.shard_nbytes);
  document.getElementById('top').replaceChildren(
    el('h1', {}, report.title || 'Plan'),
    el('p', {class: 'quiet'}, `on ${meshText()} of ${report.machine.device}; graph ${report.fingerprint}`),
    el('dl', {class: 'figures'},
      figure('Predicted time per run', time(report.makespan_seconds), time(report.makespan_seconds) !== time(report.seconds) ? `${time(report.seconds)} without overlap` : ''),
      figure('Communication', percent(sent / report.seconds), Object.entries(report.collectives).map(([kind, number]) => `${number} ${kind}`).join(', ') || 'none'),
      figure('Memory per device', bytes(peak), `${percent(peak / report.memory.budget_bytes)} of ${bytes(report.memory.budget_bytes)}`),
      figure('Weights per device', bytes(weights), ''),
      figure('Distance from the bound', boundText(), report.search && report.search.mode === 'search' ? `no plan takes less than ${time(report.search.bound_seconds)}${overlaps() ? ' without overlap' : ''}` : '')),
    live ? pinList() : '');
}

function boundText() {
  const {search} = report;
  if (!search) return 'unknown';
  if (search.mode !== 'search') return 'not proven';
  const of = chosenForMakespan() ? ' for the least time without overlap' : overlaps() ? ' without overlap' : '';
  return search.gap <= 1e-12 ? `none${of || ': optimal'}` : `at most ${percent(search.gap)}${of}`;
}

// Whether overlap shortens the plan, so that its time is not the one that the bound is of.
function overlaps() {
  return report.makespan_seconds < report.seconds * (1 - 1e-6);
}

// Whether the search found a plan of less time without overlap; the gap is of that plan.
function chosenForMakespan() {
  const {seconds, search} = report;
  return seconds * (1 - search.gap) > search.bound_seconds * (1 + 1e-9);
}

function answer(question, section, ...content) {
  return el('article', {class: 'answer'}, el('h3', {}, question), content.filter(Boolean).map(part => (part instanceof Node ? part : el('p', {}, part))), el('p', {class: 'to'}, link(section, `See ${section}`)));
}

function drawAnswers() {
  replaceBody('answers', el('div', {class: 'answers'}, peakAnswer(), collectiveAnswer(), replicationAnswer(), boundAnswer(), layersAnswer()));
}

function peakAnswer() {
  const point = peakPoint();
  const causes = peakCauses();
  const resident = heldAt(point).filter(isResident);
  const size = sum(resident, one => one.nbytes);
  const [cause] = causes, [largest] = resident;
  const name = group => (group.count > 1 ? `the ${group.count} weights ${group.name}` : group.name);
  return answer('Which tensor sets the memory peak?', 'memory',
    cause ? el('p', {}, {converted: 'A converted copy of ', buffer: 'A buffer for converting '}[cause.what] || '', el('strong', {}, cause.name), !cause.tensor.label && producers.has(cause.tensor.name) ? `, computed by ${operatorName(producers.get(cause.tensor.name))}` : '',
      `, with ${bytes(cause.nbytes)}, is the largest temporary tensor at the peak: a device holds ${bytes(report.memory.held_bytes[point])} while ${pointText(point)}.`)
      : el('p', {}, `None: a device holds ${bytes(peakBytes())} throughout the run, and nothing else.`),
    largest ? `${bytes(size)} are held throughout the run, most of it by ${name(largest)}: ${bytes(largest.nbytes)}.` : null);
}

function collectiveAnswer() {
  const [group] = collectiveGroups();
  if (!group) return answer('Which collective costs most, and why?', 'collectives', 'The plan has no collectives.');
  const total = sum(report.communications, one => one.seconds);
  const times = group.members.length > 1 ? `${group.members.length} × ${time(group.first.seconds)} = ` : '';
  return answer('Which collective costs most, and why?', 'collectives',
    el('p', {}, el('strong', {}, `${group.first.kind} at ${groupName(group)}`), `: ${times}${time(group.seconds)}, ${percent(group.seconds / total)} of all communication`,
      group.hidden > 1e-3 * group.seconds ? `, ${percent(group.hidden / group.seconds)} of it hidden.` : '.'),
    group.first.why, savingText(group.first));
}

function replicationAnswer() {
  const question = 'What would replicating a weight cost?';
  const weights = report.tensors.filter(tensor => tensor.kind === 'weight' && replicatedOf(tensor));
  if (!weights.length) {
    return answer(question, 'weights', report.search ? 'Every weight is replicated already.' : 'Unknown: the plan was not searched.');
  }
  const output = el('p', {'aria-live': 'polite'});
  const named = new Map();
  for (const weight of weights) {
    const name = patternOf(nameOf(weight));
    if (!named.has(name)) named.set(name, []);
    named.get(name).push(weight);
  }
  const show = name => {
    const alike = named.get(name);
    const [weight] = alike;
    const extra = weight.nbytes - weight.shard_nbytes;
    const each = alike.length > 1 ? ` (each of ${alike.length}; shown: ${nameOf(weight)})` : '';
    output.replaceChildren(el('strong', {}, addedText(replicatedOf(weight))), ` more per run and `, el('strong', {}, bytes(extra)), ` more per device, which ${fitText(extra)}${each}.`);
  };
  const select = el('select', {'aria-label': 'Weight', onchange: event => show(event.target.value)},
    [...named.keys()].sort(byName).map(name => el('option', {value: name}, name)));
  const [largest] = [...named.entries()].sort((a, b) => b[1][0].nbytes * b[1].length - a[1][0].nbytes * a[1].length)[0];
  select.value = largest;
  show(largest);
  return answer(question, 'weights', el('p', {}, select), output);
}

function boundAnswer() {
  const {search} = report;
  const question = 'How far is the plan from the bound?';
  if (!search) return answer(question, 'search', 'Unknown: the plan was not searched.');
  if (search.mode !== 'search') return answer(question, 'search', 'Unknown: the plan was derived from pins, without a search.');
  const late = search.time_limit_reached ? 'The search was cut short by its time limit.' : null;
  if (chosenForMakespan()) {
    return answer(question, 'search',
      el('p', {}, `No plan within the budget takes less than ${time(search.bound_seconds)} without overlap. The search found one within `,
        el('strong', {}, percent(search.gap)), ` of that, and this one (${time(report.seconds)} without overlap), which takes less time with overlap.`), late);
  }
  return answer(question, 'search',
    el('p', {}, el('strong', {}, search.gap <= 1e-12 ? 'It is optimal.' : `At most ${percent(search.gap)}.`),
      ` The plan takes ${time(report.seconds)}; no plan within the budget takes less than ${time(search.bound_seconds)}`,
      overlaps() ? ', both without overlap.' : '.'), late);
}

function layersAnswer() {
  const question = 'Which layer differs from its neighbours?';
  if (!report.families.length) return answer(question, 'model', 'Unknown: no weights have names with numbers of layers.');
  const odd = report.families.flatMap(family => family.variants.map(variant => ({family, variant})));
  const names = ({family, variant}) => {
    const [first, ...rest] = variant.members;
    const runs = rest.length && rest[rest.length - 1] - first === rest.length;
    return `${family.prefix}.${runs ? `${first} to ${rest[rest.length - 1]}` : listed(variant.members, 6)}`;
  };
  if (!odd.length) {
    const [family] = [...report.families].sort((a, b) => b.members.length - a.members.length);
    return answer(question, 'model', el('p', {}, el('strong', {}, 'None. '), `All ${family.members.length} of ${family.prefix} are planned alike.`));
  }
  return answer(question, 'model', el('ul', {}, odd.slice(0, 4).map(one => el('li', {},
    el('strong', {}, names(one)), `: ${one.variant.differences.slice(0, 2).join('; ') || 'differs'}`))),
  odd.length > 4 ? `and ${odd.length - 4} more` : null,
  el('p', {class: 'quiet'}, report.families.map(family => `${family.usual.length} of ${family.members.length} ${family.prefix} are alike`).join(', ')));
}

function searchText() {
  const plan = `The search ended with ${time(report.seconds)}${overlaps() ? ` without overlap, ${time(report.makespan_seconds)} with it` : ''}.`;
  return chosenForMakespan() ? `${plan} The plan was chosen for its time with overlap.` : plan;
}

function drawSearch() {
  const {search} = report;
  if (!search) {
    replaceBody('search', el('p', {}, 'The plan was given, not searched.'));
    return;
  }
  const slowest = Math.max(...search.incumbents.map(one => one.seconds));
  replaceBody('search',
    el('p', {class: 'lead'}, search.mode === 'search' ? `${searchText()} No plan takes less than ${time(search.bound_seconds)}${overlaps() ? ' without overlap' : ''}: the gap is ${percent(search.gap)}${chosenForMakespan() ? ', of the least time without overlap that was found' : ''}.`
      : 'The plan follows from pins, without a search.', search.time_limit_reached ? ' The time limit was reached, so the plan depends on the speed of the machine.' : ''),
    scrolling('The best plans during the search; times are without overlap',
      el('thead', {}, el('tr', {}, ['plan', 'predicted', 'lower bound', 'gap', 'after'].map((text, n) => el('th', {scope: 'col', class: n ? 'number' : null}, text)))),
      el('tbody', {}, search.incumbents.map((one, n) => el('tr', {}, el('th', {scope: 'row'}, `${n + 1}`), el('td', {class: 'number'}, bar(one.seconds / slowest, time(one.seconds))),
        el('td', {class: 'number'}, one.bound_seconds > 0 ? time(one.bound_seconds) : '–'), el('td', {class: 'number'}, percent(Math.max(0, 1 - one.bound_seconds / one.seconds))),
        el('td', {class: 'number'}, one.elapsed_seconds === null ? '–' : time(one.elapsed_seconds)))))),
    search.steps.length ? scrolling('The steps of the search within the memory budget',
      el('thead', {}, el('tr', {}, ['step', 'gap before', 'gap after', 'took'].map((text, n) => el('th', {scope: 'col', class: n ? 'number' : null}, text)))),
      el('tbody', {}, search.steps.map(one => el('tr', {}, el('th', {scope: 'row'}, one.name), [one.gap_before, one.gap_after].map(gap => el('td', {class: 'number'}, gap === null ? 'no plan' : percent(gap))),
        el('td', {class: 'number'}, one.seconds === null ? '–' : time(one.seconds)))))) : '');
}

function drawOperators() {
  const seconds = operator => operator.compute_seconds + operator.reduce_seconds + operator.conversion_seconds;
  replaceBody('operators', dataTable(report.operators, [
    {title: 'operator', sort: operator => operator.index, cell: operator => operatorName(operator)},
    ...given.columns.map(fieldColumn),
    {title: 'resharding', number: true, sort: operator => seconds(operator) - operator.compute_seconds, cell: operator => {
      const communication = seconds(operator) - operator.compute_seconds;
      return communication ? time(communication) : '–';
    }},
    {title: 'next best', number: true, sort: operator => (operator.runner_up ? added(operator.runner_up) : Infinity), cell: operator => (operator.runner_up ? addedText(operator.runner_up) : '–')},
  ], {caption: 'Operators in execution order', filter: operator => `${operatorName(operator)} ${operator.module} ${operator.spec}`,
    details: operator => el('div', {class: 'panel'}, operatorDetails(operator).filter(Boolean))}));
}

// ---- Pins, where the page is served

function pinList() {
  const before = first === report ? null : `${time(first.makespan_seconds)} without these pins`;
  return el('div', {class: 'pins'}, el('h2', {}, 'Pins'), pins.size ? el('ul', {}, [...pins].map(([name, spec]) => el('li', {}, el('code', {}, `${name} = ${spec}`), ' ',
    el('button', {type: 'button', onclick: () => { const others = new Map(wanted); others.delete(name); searchAgain(others); }}, `Unpin ${name}`))))
    : el('p', {class: 'quiet'}, 'None. Select a weight of the model to pin it and search again.'), before ? el('p', {}, before) : null);
}

// Answers may come in another order than they were asked for: all but the latest one's are ignored.
async function searchAgain(requested) {
  const number = ++searches;
  wanted = requested;
  say('Searching …');
  document.body.setAttribute('aria-busy', 'true');
  try {
    const response = await fetch('plan', {
      method: 'POST', headers: {'Content-Type': 'application/json'}, body: JSON.stringify(Object.fromEntries(requested)),
    });
    const data = await response.json();
    if (number !== searches) return;
    if (!response.ok) throw new Error(data.error);
    pins = requested;
    take(data.report);
    drawAll();
    say(`${time(report.makespan_seconds)}, ${more(report.makespan_seconds - first.makespan_seconds, time)} compared with the plan without pins`);
  } catch (error) {
    if (number !== searches) return;
    wanted = pins;
    say(`No plan: ${error.message}`);
  } finally {
    if (number === searches) document.body.removeAttribute('aria-busy');
  }
}

function drawAll() {
  drawTop();
  drawAnswers();
  drawModel();
  drawWeights();
  drawCollectives();
  drawMemory();
  drawTimeline();
  drawSearch();
  drawOperators();
}

take(given.report);
drawAll();
window.addEventListener('resize', () => redrawTimeline());
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => redrawTimeline());
document.body.dataset.ready = 'yes';
