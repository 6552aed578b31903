// Collectives and weights. Those that differ only in the number of their layer are one row.

function collectiveGroups() {
  const groups = new Map();
  report.communications.forEach((one, number) => {
    const operator = one.operator === null ? null : report.operators[one.operator];
    const where = operator ? patternOf(operator.label || operator.module) || operator.kind : 'graph output';
    const key = [where, operator && operator.kind, one.purpose, one.step, one.source, one.target, one.nbytes, one.seconds].join('\n');
    if (!groups.has(key)) groups.set(key, {where, operator, first: one, members: []});
    groups.get(key).members.push({...one, number});
  });
  const result = [...groups.values()];
  for (const group of result) {
    group.seconds = sum(group.members, one => one.seconds);
    group.hidden = sum(group.members, one => one.hidden_seconds);
    group.nbytes = sum(group.members, one => one.nbytes);
  }
  return result.sort((a, b) => b.seconds - a.seconds);
}

const PURPOSES = {reduce: 'reduces', convert: 'converts for', deliver: 'delivers'};

function groupName(group) {
  const kind = group.operator ? `${group.operator.kind} ` : '';
  return `${kind}${group.where}`;
}

function savingText(one) {
  const saving = one.without;
  if (!saving) return report.search ? 'No change avoids it.' : 'Unknown: the plan was not searched.';
  const seconds = added(saving);
  const whose = changedName(saving.changed);
  const costs = isSame(seconds, report.seconds) ? 'takes no longer in the cost model'
    : `takes ${saving.at_least_seconds === null ? 'up to' : 'at least'} ${time(seconds)} more (${more(seconds / report.seconds, percent)})`;
  return `The best plan without it makes ${whose} ${saving.spec}, and ${costs}.`;
}

function changedName(name) {
  if (name.startsWith('op:')) return operatorName(report.operators[Number(name.slice(3))]);
  const tensor = tensors.get(name);
  return tensor ? nameOf(tensor) : `output ${name.slice(1)}`;
}

function communicationDetails(one) {
  return el('div', {class: 'communication'},
    el('p', {}, el('code', {}, one.step), ` of ${nameOf(tensors.get(one.tensor))}: ${bytes(one.nbytes)} in groups of ${one.devices}, ${time(one.seconds)}`,
      one.hidden_seconds ? `, ${time(one.hidden_seconds)} of it overlaps with computation` : ''),
    facts([
      ['Why', one.why],
      ['Before', el('code', {}, one.source)],
      ['After', el('code', {}, one.target)],
      ['Next best', savingText(one)],
    ]));
}

function drawCollectives() {
  const groups = collectiveGroups();
  if (!groups.length) {
    replaceBody('collectives', el('p', {}, 'The plan has no collectives.'));
    return;
  }
  const kinds = Object.entries(report.collectives).map(([kind, number]) => `${number} ${kind}`).join(', ');
  const total = sum(groups, group => group.seconds);
  const table = dataTable(groups, [
    {title: 'where', sort: group => groupName(group), cell: group => [`${groupName(group)} `, el('span', {class: 'quiet'}, PURPOSES[group.first.purpose].replace(' for', ''))]},
    {title: 'collective', sort: group => group.first.step, cell: group => el('code', {}, group.first.step)},
    {title: 'count', number: true, sort: group => group.members.length, cell: group => String(group.members.length)},
    {title: 'bytes each', number: true, sort: group => group.first.nbytes, cell: group => bytes(group.first.nbytes)},
    {title: 'time each', number: true, sort: group => group.first.seconds, cell: group => time(group.first.seconds)},
    {title: 'time in all', number: true, sort: group => group.seconds, cell: group => bar(group.seconds / total, time(group.seconds))},
    {title: 'hidden', number: true, sort: group => group.hidden / group.seconds, cell: group => (group.hidden > 1e-3 * group.seconds ? percent(group.hidden / group.seconds) : '–')},
  ], {
    caption: 'Collectives, those of equal layers as one row', sorted: 5,
    filter: group => `${groupName(group)} ${group.first.step} ${group.first.why}`,
    details: group => el('div', {}, communicationDetails(group.first),
      group.members.length > 1 ? el('p', {class: 'quiet'}, `Also at ${listed(group.members.slice(1).map(placeOf))}.`) : null),
  });
  replaceBody('collectives', el('p', {class: 'lead'}, `${kinds}: ${time(total)} in all, ${percent(total / report.seconds)} of the time without overlap. `,
    'Bytes are those of the tensor that a group holds together. Open a row for the reason and the next best plan.'), table);
}

const placeOf = one => (one.operator === null ? 'an output' : operatorName(report.operators[one.operator]));

function listed(texts, most = 40) {
  return texts.length > most ? `${texts.slice(0, most).join(', ')} and ${texts.length - most} more` : texts.join(', ');
}

function bar(share, text) {
  return el('span', {class: 'bar'}, el('span', {class: 'length', style: {width: `${Math.max(1, 100 * share)}%`}}), el('span', {class: 'label'}, text));
}

function drawWeights() {
  const weights = report.tensors.filter(tensor => tensor.kind === 'weight');
  const groups = new Map();
  for (const weight of weights) {
    const other = replicatedOf(weight);
    const key = [patternOf(nameOf(weight)), shapeText(weight), weight.dtype, weight.spec, other ? addedText(other) : ''].join('\n');
    if (!groups.has(key)) groups.set(key, {weight, other, members: []});
    groups.get(key).members.push(weight);
  }
  const rows = [...groups.values()];
  const extra = row => (row.other ? row.weight.nbytes - row.weight.shard_nbytes : 0);
  const table = dataTable(rows, [
    {title: 'weight', sort: row => nameOf(row.weight), cell: row => el('button', {type: 'button', class: 'link', onclick: () => showTensor(row.weight)},
      row.members.length > 1 ? patternOf(nameOf(row.weight)) : nameOf(row.weight))},
    {title: 'count', number: true, sort: row => row.members.length, cell: row => String(row.members.length)},
    {title: 'shape', sort: row => row.weight.nbytes, cell: row => shapeText(row.weight)},
    {title: 'stored as', sort: row => row.weight.spec, cell: row => specChip(row.weight)},
    {title: 'per device, each', number: true, sort: row => row.weight.shard_nbytes, cell: row => bytes(row.weight.shard_nbytes)},
    {title: 'per device, all', number: true, sort: row => row.weight.shard_nbytes * row.members.length, cell: row => bytes(row.weight.shard_nbytes * row.members.length)},
    {title: 'one replicated: time', number: true, sort: row => (row.other ? added(row.other) : -1), cell: row => replicationText(row.weight, row.other)},
    {title: 'memory', number: true, sort: extra, cell: row => (row.other ? [more(extra(row), bytes), ' ', el('span', {class: 'quiet'}, peakWith(extra(row)) > report.memory.budget_bytes ? 'over' : 'fits')] : '–')},
  ], {
    caption: 'Weights, and what it would cost to replicate one of them', sorted: 5, hint: 'Filter by name',
    filter: row => `${row.members.map(nameOf).join(' ')} ${row.weight.spec}`,
  });
  replaceBody('weights', el('p', {class: 'lead'}, `${count(weights.length, 'weight')}, ${bytes(sum(weights, one => one.shard_nbytes))} a device of ${bytes(sum(weights, one => one.nbytes))}. `,
    'The time is what replicating that weight adds to the best plan, whatever memory it needs; the memory is what the copy adds to a device.'), table);
}

const isReplicated = spec => parseSpec(spec).every(axes => !axes.length);
const replicatedOf = weight => weight.alternatives.find(choice => isReplicated(choice.spec));

function replicationText(weight, other) {
  if (other) return addedText(other);
  return isReplicated(weight.spec) ? 'replicated' : '–';
}
