// Sharding specs, in words and drawn on the mesh.

// The mesh axes that split each dim. Parts, as in S0[5,4], are left out: shards are drawn as if they were equal.
function parseSpec(text) {
  const inner = text.slice(1, -1).replace(/\[[^\]]*\]/g, '').trim();
  if (!inner) return [];
  return inner.split(',').map(part => {
    const token = part.trim();
    return token.startsWith('S') ? [...token.slice(1)].map(Number) : [];
  });
}

const groupSize = axes => axes.reduce((size, axis) => size * report.mesh_shape[axis], 1);
const deviceCount = () => groupSize(report.mesh_shape.map((_, axis) => axis));

function axesText(axes) {
  return [...axes].sort().map(axis => report.mesh_axes[axis]).join(' and ');
}

function specWords(text) {
  const split = parseSpec(text).map((axes, dim) => axes.length ? `dim ${dim} split ${groupSize(axes)} ways over ${axesText(axes)}` : '')
    .filter(Boolean);
  return split.join(', ') || 'whole on every device';
}

function coordinateOf(rank) {
  const coordinate = [];
  for (const size of [...report.mesh_shape].reverse()) {
    coordinate.unshift(rank % size);
    rank = Math.floor(rank / size);
  }
  return coordinate;
}

// The number of the part of a dim that a device holds; axes are major to minor.
const partOf = (axes, coordinate) => axes.reduce((part, axis) => part * report.mesh_shape[axis] + coordinate[axis], 0);

// The two dims that a drawing shows as rows and columns: the first and the last one that are split, if there are two.
function drawnDims(spec, ndim) {
  const split = [];
  spec.forEach((axes, dim) => { if (axes.length) split.push(dim); });
  if (split.length >= 2) return [split[0], split[split.length - 1]];
  if (split.length === 1) return split[0] === ndim - 1 ? [ndim - 2, split[0]] : [split[0], ndim - 1];
  return [ndim - 2, ndim - 1];
}

const axisColor = axes => axes.length ? `var(--axis${axes[0] % 4})` : 'var(--whole)';

// A tensor as a rectangle that is cut into its shards; the shard of one device is filled.
function shardDrawing(specText, ndim, rank, width, height) {
  const spec = parseSpec(specText);
  const coordinate = coordinateOf(rank);
  const [rowDim, columnDim] = drawnDims(spec, ndim);
  const dims = [rowDim, columnDim].map(dim => {
    const axes = dim >= 0 && dim < spec.length ? spec[dim] : [];
    return {axes, parts: groupSize(axes), part: partOf(axes, coordinate)};
  });
  const [rows, columns] = dims;
  const w = width - 1, h = height - 1;
  const drawing = svg('svg', {width, height, viewBox: `0 0 ${width} ${height}`, class: 'shard', 'aria-hidden': 'true'});
  const isSplit = rows.parts > 1 || columns.parts > 1;
  drawing.append(svg('rect', {x: 0.5, y: 0.5, width: w, height: h, class: 'tensor'}));
  drawing.append(svg('rect', {
    x: 0.5 + (w * columns.part) / columns.parts, y: 0.5 + (h * rows.part) / rows.parts,
    width: w / columns.parts, height: h / rows.parts,
    fill: isSplit ? axisColor(rows.axes.length ? rows.axes : columns.axes) : 'var(--whole)',
  }));
  const lines = (parts, length, draw) => {
    if (length / parts < 2.5) return;
    for (let n = 1; n < parts; n += 1) drawing.append(draw(0.5 + (length * n) / parts));
  };
  lines(columns.parts, w, x => svg('line', {x1: x, x2: x, y1: 0.5, y2: h + 0.5, class: 'cut'}));
  lines(rows.parts, h, y => svg('line', {x1: 0.5, x2: w + 0.5, y1: y, y2: y, class: 'cut'}));
  return drawing;
}

const glyph = tensor => shardDrawing(tensor.spec, tensor.shape.length, 0, 30, 20);

function sliceText(tensor, specText, rank) {
  const coordinate = coordinateOf(rank);
  return parseSpec(specText).map((axes, dim) => {
    if (!axes.length) return ':';
    const size = Math.ceil(tensor.shape[dim] / groupSize(axes));
    const begin = Math.min(partOf(axes, coordinate) * size, tensor.shape[dim]);
    return `${begin}:${Math.min(begin + size, tensor.shape[dim])}`;
  }).join(', ');
}

const MOST_DRAWN = 64;

// A tensor's shard on each device of the mesh; devices of the last mesh axis are in a row.
function meshDrawing(tensor, specText) {
  const devices = deviceCount();
  const shown = Math.min(devices, MOST_DRAWN);
  const columns = Math.min(report.mesh_shape[report.mesh_shape.length - 1], 8);
  const cells = [];
  for (let rank = 0; rank < shown; rank += 1) {
    const slices = sliceText(tensor, specText, rank);
    const where = coordinateOf(rank).map((at, axis) => `${report.mesh_axes[axis]} ${at}`).join(', ');
    cells.push(el('li', {title: `Device ${rank} (${where}) holds [${slices}]`},
      shardDrawing(specText, tensor.shape.length, rank, 66, 44),
      el('span', {class: 'rank'}, `${rank}`), el('span', {class: 'slice'}, `[${slices}]`)));
  }
  return el('figure', {class: 'mesh'},
    el('figcaption', {}, `${specText}: ${specWords(specText)}`, devices > shown ? `. The first ${shown} of ${devices} devices:` : ''),
    el('ol', {class: 'devices', style: {'--columns': String(columns)}}, cells));
}

// A small drawing of a spec, with its text, for tables.
function specChip(tensor, specText = tensor.spec) {
  return el('span', {class: 'spec', title: specWords(specText)},
    shardDrawing(specText, tensor.shape.length, 0, 30, 20), el('code', {}, specText));
}
