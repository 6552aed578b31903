// Memory of a device over the run: tensors that are held throughout, temporary tensors, and the budget.

const CHART = {width: 1000, height: 260, left: 62, top: 14, bottom: 26};

function pointText(point) {
  const per = report.memory.points_per_operator;
  const number = Math.floor(point / per);
  if (number >= report.operators.length) return 'delivering graph outputs';
  const part = ['converting inputs of', 'running', 'reducing results of'][point % per] || 'at';
  return `${part} ${operatorName(report.operators[number])}`;
}

function heldAt(point) {
  const groups = new Map();
  for (const holding of report.memory.holdings) {
    if (holding.begin > point || holding.end < point) continue;
    const tensor = tensors.get(holding.tensor);
    const name = isResident(holding) && tensor.label ? patternOf(tensor.label) : nameOf(tensor);
    const key = `${holding.what} ${name}`;
    if (!groups.has(key)) groups.set(key, {name, what: holding.what, tensor, nbytes: 0, count: 0, begin: holding.begin, end: holding.end});
    const group = groups.get(key);
    group.nbytes += holding.nbytes; group.count += 1;
  }
  return [...groups.values()].sort((a, b) => b.nbytes - a.nbytes);
}

function placeText(point) {
  const number = Math.floor(point / report.memory.points_per_operator);
  return number < report.operators.length ? `operator ${number}` : 'graph outputs';
}

const isResident = holding => ['weight', 'input', 'output'].includes(holding.what);

function peakPoint() {
  return report.memory.held_bytes.indexOf(peakBytes());
}

// Temporary tensors at the peak, the largest first.
const peakCauses = () => heldAt(peakPoint()).filter(group => !isResident(group));

function niceStep(most, ticks) {
  const unit = 2 ** Math.floor(Math.log2(most / ticks || 1));
  return [1, 2, 4].map(factor => factor * unit).find(step => most / step <= ticks) || 8 * unit;
}

// With ``detail`` the chart begins at the bytes that are held throughout, so that temporary tensors are visible.
function drawMemory(detail = false) {
  const {held_bytes: held, budget_bytes: budget} = report.memory;
  const peak = peakBytes(), at = peakPoint();
  const resident = sum(report.memory.holdings.filter(isResident), one => one.nbytes);
  const floor = detail ? resident : 0;
  const room = peak - floor;
  const top = floor + Math.max(budget <= floor + 1.6 * room ? 1.06 * (budget - floor) : 0, 1.1 * room, 1);
  const x = point => CHART.left + ((CHART.width - CHART.left - 8) * point) / Math.max(1, held.length - 1);
  const y = count => CHART.top + (CHART.height - CHART.top - CHART.bottom) * (1 - Math.max(0, count - floor) / (top - floor));
  // One column per pixel, each with the peak of its program points.
  const columns = Math.min(held.length, CHART.width - CHART.left);
  const outline = [];
  for (let n = 0; n < columns; n += 1) {
    const first = Math.floor((n * held.length) / columns), end = Math.max(first + 1, Math.floor(((n + 1) * held.length) / columns));
    let most = 0;
    for (let point = first; point < end; point += 1) most = Math.max(most, held[point]);
    outline.push(`${x(first).toFixed(1)},${y(most).toFixed(1)}`, `${x(Math.min(end, held.length - 1)).toFixed(1)},${y(most).toFixed(1)}`);
  }
  const base = y(floor), right = x(held.length - 1);
  const chart = svg('svg', {viewBox: `0 0 ${CHART.width} ${CHART.height}`, class: 'chart', role: 'img',
    'aria-label': `Bytes held by a device over the run: ${bytes(resident)} throughout, ${bytes(peak)} at most, ${pointText(at)}. The budget is ${bytes(budget)}.`});
  const step = niceStep(top - floor, 5);
  for (let tick = 0; tick <= top - floor; tick += step) {
    chart.append(svg('line', {x1: CHART.left, x2: right, y1: y(floor + tick), y2: y(floor + tick), class: 'grid'}),
      svg('text', {x: CHART.left - 6, y: y(floor + tick) + 4, 'text-anchor': 'end'}, `${detail ? '+' : ''}${bytes(tick)}`));
  }
  chart.append(svg('polygon', {points: `${CHART.left},${base} ${outline.join(' ')} ${right},${base}`, class: 'live'}),
    svg('rect', {x: CHART.left, y: y(resident), width: right - CHART.left, height: base - y(resident), class: 'resident'}));
  if (budget <= top) {
    chart.append(svg('line', {x1: CHART.left, x2: right, y1: y(budget), y2: y(budget), class: 'budget'}),
      svg('text', {x: right, y: y(budget) - 5, 'text-anchor': 'end', class: 'budget-text'}, `budget ${bytes(budget)}`));
  }
  const cursor = svg('line', {y1: CHART.top, y2: base, class: 'cursor'});
  const mark = svg('circle', {r: 4, class: 'cursor-mark'});
  chart.append(svg('text', {x: CHART.left, y: CHART.height - 6}, 'first operator'),
    svg('text', {x: right, y: CHART.height - 6, 'text-anchor': 'end'}, 'last operator'), cursor, mark);

  const readout = el('p', {class: 'readout'});
  const list = el('div');
  const slider = el('input', {type: 'range', min: 0, max: held.length - 1, step: 1, value: at, 'aria-label': 'Point of the run',
    oninput: event => move(Number(event.target.value))});

  function move(point) {
    slider.value = String(point);
    slider.setAttribute('aria-valuetext', `${bytes(held[point])}, ${pointText(point)}`);
    for (const [name, value] of [['x1', x(point)], ['x2', x(point)]]) cursor.setAttribute(name, value);
    mark.setAttribute('cx', x(point));
    mark.setAttribute('cy', y(held[point]));
    readout.replaceChildren(el('strong', {}, bytes(held[point])), ` ${pointText(point)}`, point === at ? ' – the peak' : '');
    const groups = heldAt(point);
    const shown = groups.slice(0, 12);
    list.replaceChildren(scrolling('What a device holds at this point',
      el('thead', {}, el('tr', {}, ['tensor', 'what', 'bytes', 'from', 'to'].map((text, n) => el('th', {scope: 'col', class: n === 2 ? 'number' : null}, text)))),
      el('tbody', {}, shown.map(group => el('tr', {},
        el('th', {scope: 'row'}, group.name, group.count > 1 ? el('span', {class: 'quiet'}, ` × ${group.count}`) : '',
          group.what !== 'weight' && !group.tensor.label ? el('span', {class: 'quiet'}, ` ${producers.has(group.tensor.name) ? operatorName(producers.get(group.tensor.name)) : ''}`) : ''),
        el('td', {}, group.what), el('td', {class: 'number'}, bar(group.nbytes / groups[0].nbytes, bytes(group.nbytes))),
        el('td', {}, isResident(group) ? 'the start' : placeText(group.begin)),
        el('td', {}, isResident(group) ? 'the end' : placeText(group.end))))),
      groups.length > 12 ? el('tfoot', {}, el('tr', {}, el('td', {colspan: 5}, `and ${count(groups.length - 12, 'other')}, ${bytes(sum(groups.slice(12), one => one.nbytes))}`))) : null));
  }

  chart.addEventListener('click', event => {
    const box = chart.getBoundingClientRect();
    const place = ((event.clientX - box.left) * CHART.width) / box.width;
    move(Math.round(Math.min(1, Math.max(0, (place - CHART.left) / (right - CHART.left))) * (held.length - 1)));
  });
  move(at);
  const overlapped = report.overlapped_bytes;
  const ranks = report.memory.ranks || [];
  replaceBody('memory',
    el('p', {class: 'lead'}, `${bytes(peak)} at most, of ${bytes(budget)} (${percent(peak / budget)}); ${bytes(resident)} of it throughout. `,
      overlapped && bytes(overlapped) !== bytes(peak) ? `With communication beside computation a device holds ${bytes(overlapped)} at most. ` : '',
      traces.filter(trace => trace.process_bytes !== null)
        .map(trace => `The process of rank ${trace.rank} grew by ${bytes(trace.process_bytes)} until it was measured, with its kernels and libraries. `),
      el('button', {type: 'button', class: 'link', onclick: () => move(at)}, 'Go to the peak')),
    ranks.length ? el('p', {}, `This is the device at (${report.memory.device.join(', ')}), which has the least room left. `,
      `Parts are unequal: by rank, devices hold ${ranks.map(rank => `${bytes(rank.peak_bytes)} of ${bytes(rank.budget_bytes)}`).join(', ')}.`) : null,
    el('ul', {class: 'legend'}, el('li', {}, el('span', {class: 'swatch resident'}), 'held throughout: weights, inputs, outputs'),
      el('li', {}, el('span', {class: 'swatch live'}), 'temporary: activations, conversions')),
    el('label', {class: 'choice'}, el('input', {type: 'checkbox', checked: detail, onchange: event => {
      drawMemory(event.target.checked);
      document.querySelector('#memory input[type=checkbox]').focus();
    }}), ' Only temporary tensors'),
    chart, slider, readout, list);
}
