// The predicted timeline, with measured ones below it on the same scale. Spans are drawn on a canvas and read out one
// by one.

const LANE = 30, GAP = 6, LABEL = 118;

function timelineLanes() {
  const predicted = {title: 'predicted', seconds: report.makespan_seconds, spans: report.timeline.map(span => ({
    ...span, text: spanText(span),
  }))};
  const measured = traces.map(trace => ({title: `measured, rank ${trace.rank}`, seconds: trace.seconds, spans: trace.spans.map(span => ({
    ...span, text: span.what ? `${span.name}: ${span.what}` : span.name,
  }))}));
  const lanes = [];
  for (const part of [predicted, ...measured]) {
    for (const stream of ['compute', 'communication']) {
      const spans = part.spans.filter(span => span.stream === stream);
      if (spans.length || part === predicted) lanes.push({title: part.title, stream, spans, total: part.seconds});
    }
  }
  return lanes;
}

function spanText(span) {
  const where = span.operator === null ? 'graph outputs' : operatorName(report.operators[span.operator]);
  if (!span.what) return where;
  const match = /^(.*) of (\S+)$/.exec(span.what);
  const what = match && tensors.has(match[2]) ? `${match[1]} of ${nameOf(tensors.get(match[2]))}` : span.what;
  return `${what}, at ${where}`;
}

function drawTimeline() {
  const lanes = timelineLanes();
  const longest = Math.max(...lanes.map(lane => lane.total));
  const canvas = el('canvas', {tabindex: '0', role: 'application', 'aria-label':
    'Timeline. Left and right move from kernel to kernel, up and down from lane to lane, plus and minus change the scale.'});
  const readout = el('p', {class: 'readout', 'aria-live': 'polite'});
  const view = {begin: 0, seconds: longest};
  let chosen = null;
  const height = lanes.length * (LANE + GAP) + 26;

  function place(seconds, width) {
    return LABEL + ((seconds - view.begin) / view.seconds) * (width - LABEL);
  }

  function draw() {
    const width = canvas.clientWidth || 800;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.setProperty('height', `${height}px`);
    const context = canvas.getContext('2d');
    const style = getComputedStyle(document.documentElement);
    const color = name => style.getPropertyValue(name).trim();
    context.scale(ratio, ratio);
    context.clearRect(0, 0, width, height);
    context.font = '12px system-ui, sans-serif';
    context.textBaseline = 'middle';
    lanes.forEach((lane, n) => {
      const y = n * (LANE + GAP);
      context.fillStyle = color('--lane');
      context.fillRect(LABEL, y, width - LABEL, LANE);
      context.save();
      context.beginPath();
      context.rect(LABEL, y, width - LABEL, LANE);
      context.clip();
      const fill = color(lane.stream === 'compute' ? '--compute' : '--communication');
      let drawn = -1;  // the end of the last span that is drawn; a later one that ends before it would be invisible
      for (const span of lane.spans) {
        const x = place(span.begin_seconds, width), end = place(span.begin_seconds + span.seconds, width);
        if (end < LABEL || x > width || end < drawn + 0.5) continue;
        context.fillStyle = fill;
        context.fillRect(x, y + 2, Math.max(0.75, end - x - (end - x > 3 ? 1 : 0)), LANE - 4);
        drawn = end;
        if (end - x > 60) {
          context.fillStyle = color('--on-color');
          context.save();
          context.beginPath();
          context.rect(x, y, end - x - 4, LANE);
          context.clip();
          context.fillText(span.text, Math.max(x, LABEL) + 5, y + LANE / 2);
          context.restore();
        }
      }
      if (chosen && chosen.lane === n) {
        const span = lane.spans[chosen.span];
        const x = place(span.begin_seconds, width), end = place(span.begin_seconds + span.seconds, width);
        context.strokeStyle = color('--text');
        context.lineWidth = 2;
        context.strokeRect(x, y + 1, Math.max(3, end - x), LANE - 2);
      }
      context.restore();
      context.fillStyle = color('--text');
      context.fillText(lane.stream, 0, y + LANE / 2 - 7);
      context.fillStyle = color('--quiet');
      context.fillText(lane.title, 0, y + LANE / 2 + 7);
    });
    const step = tickStep(view.seconds / Math.max(2, (width - LABEL) / 110));
    context.fillStyle = color('--quiet');
    for (let tick = Math.ceil(view.begin / step) * step; tick <= view.begin + view.seconds; tick += step) {
      const x = place(tick, width);
      context.fillRect(x, 0, 0.5, height - 20);
      if (x < width - 50) context.fillText(time(tick), x + 3, height - 10);
    }
  }

  function zoom(factor, middle) {
    const at = middle === undefined ? view.begin + view.seconds / 2 : middle;
    const seconds = Math.min(longest, Math.max(longest / 5000, view.seconds * factor));
    scroll(at - (at - view.begin) * (seconds / view.seconds), seconds);
  }

  function scroll(begin, seconds = view.seconds) {
    view.seconds = seconds;
    view.begin = Math.min(longest - seconds, Math.max(0, begin));
    position.value = String(longest > seconds ? view.begin / (longest - seconds) : 0);
    draw();
  }

  function choose(lane, span) {
    const {begin_seconds: begin, seconds, text} = lanes[lane].spans[span] || {};
    if (text === undefined) return;
    chosen = {lane, span};
    if (begin < view.begin || begin + seconds > view.begin + view.seconds) {
      scroll(begin + seconds / 2 - view.seconds / 2);
    } else draw();
    readout.textContent = `${text}: ${time(seconds)}, from ${time(begin)} (${lanes[lane].title})`;
  }

  function spanAt(event) {
    const box = canvas.getBoundingClientRect();
    const lane = Math.floor((event.clientY - box.top) / (LANE + GAP));
    const at = view.begin + ((event.clientX - box.left - LABEL) / (box.width - LABEL)) * view.seconds;
    if (!lanes[lane] || event.clientX - box.left < LABEL) return null;
    const slack = (view.seconds / box.width) * 2;
    const {spans} = lanes[lane];
    let low = 0, high = spans.length;  // binary search of the first span that begins after the pointer
    while (low < high) {
      const middle = (low + high) >> 1;
      if (spans[middle].begin_seconds <= at + slack) low = middle + 1; else high = middle;
    }
    const span = low - 1;
    return span >= 0 && spans[span].begin_seconds + spans[span].seconds >= at - slack ? {lane, span} : null;
  }

  canvas.addEventListener('click', event => { const hit = spanAt(event); if (hit) choose(hit.lane, hit.span); });
  canvas.addEventListener('mousemove', event => {
    const hit = spanAt(event);
    canvas.title = hit ? `${lanes[hit.lane].spans[hit.span].text}: ${time(lanes[hit.lane].spans[hit.span].seconds)}` : '';
  });
  canvas.addEventListener('wheel', event => {
    if (!event.ctrlKey) return;  // the page scrolls otherwise
    event.preventDefault();
    const box = canvas.getBoundingClientRect();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, view.begin + ((event.clientX - box.left - LABEL) / (box.width - LABEL)) * view.seconds);
  }, {passive: false});
  canvas.addEventListener('keydown', event => {
    const {lane, span} = chosen || {lane: 0, span: -1};
    if (event.key === 'ArrowRight') choose(lane, span + 1);
    else if (event.key === 'ArrowLeft') choose(lane, span - 1);
    else if (event.key === 'Home') choose(lane, 0);
    else if (event.key === 'End') choose(lane, lanes[lane].spans.length - 1);
    else if (event.key === 'ArrowDown' || event.key === 'ArrowUp') {
      const next = lane + (event.key === 'ArrowDown' ? 1 : -1);
      if (lanes[next]) {
        const at = chosen ? lanes[lane].spans[span].begin_seconds : 0;
        const near = lanes[next].spans.findIndex(one => one.begin_seconds + one.seconds > at);
        choose(next, near < 0 ? lanes[next].spans.length - 1 : near);
      }
    } else if (event.key === '+' || event.key === '=') zoom(0.5);
    else if (event.key === '-') zoom(2);
    else return;
    event.preventDefault();
  });
  const position = el('input', {type: 'range', min: 0, max: 1, step: 'any', value: 0, 'aria-label': 'Part of the timeline',
    oninput: event => scroll(Number(event.target.value) * (longest - view.seconds))});
  const buttons = el('div', {class: 'buttons'},
    el('button', {type: 'button', onclick: () => zoom(0.5)}, 'Zoom in'),
    el('button', {type: 'button', onclick: () => zoom(2)}, 'Zoom out'),
    el('button', {type: 'button', onclick: () => scroll(0, longest)}, 'Whole run'), position);
  const computed = sum(report.timeline.filter(span => span.stream === 'compute'), span => span.seconds);
  const sent = sum(report.timeline.filter(span => span.stream === 'communication'), span => span.seconds);
  replaceBody('timeline',
    el('p', {class: 'lead'}, `Predicted: ${time(report.makespan_seconds)}. Kernels and copies take ${time(computed)}, collectives ${time(sent)}`,
      report.machine.overlaps_communication ? `, of which ${time(Math.max(0, computed + sent - report.makespan_seconds))} overlap with kernels. ` : '. ',
      traces.length ? traces.map(trace => `Measured on rank ${trace.rank}: ${time(trace.seconds)} (${(trace.seconds / report.makespan_seconds).toFixed(2)} times the prediction). `)
        : 'No run was measured: --profile takes traces of runs.'),
    traces.length ? comparison() : null,
    buttons, canvas, readout);
  redrawTimeline = draw;
  draw();
}

let redrawTimeline = () => {};

function tickStep(least) {
  const unit = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map(factor => factor * unit).find(step => step >= least);
}

function comparison() {
  const total = (spans, stream) => sum(spans.filter(span => span.stream === stream), span => span.seconds);
  const row = (name, spans, seconds) => {
    const computed = total(spans, 'compute'), sent = total(spans, 'communication');
    return el('tr', {}, el('th', {scope: 'row'}, name), [computed, sent, seconds].map(value => el('td', {class: 'number'}, time(value))));
  };
  return scrolling('Predicted beside measured; a measured collective includes waiting for the other ranks',
    el('thead', {}, el('tr', {}, ['', 'kernels', 'collectives', 'in all'].map((text, n) => el('th', {scope: 'col', class: n ? 'number' : null}, text)))),
    el('tbody', {}, row('predicted', report.timeline, report.makespan_seconds), traces.map(trace => row(`measured, rank ${trace.rank}`, trace.spans, trace.seconds))));
}
