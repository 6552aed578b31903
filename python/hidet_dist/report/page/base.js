// Data, elements and figures. Texts enter the page as text nodes and attributes only, never as markup.

function unpack(packed) {
  const {schema, texts} = packed;
  const readers = {};
  function reader(type) {
    if (type === 'raw') return value => value;
    if (type === 'text') return value => value === null ? null : texts[value];
    if (Array.isArray(type)) {
      const element = reader(type[1]);
      return values => values === null ? null : values.map(element);
    }
    return value => value === null ? null : readers[type](value);
  }
  for (const [name, fields] of Object.entries(schema)) {
    let fieldReaders = null;  // made at first use, since dataclasses may refer to each other
    readers[name] = values => {
      fieldReaders = fieldReaders || fields.map(([field, type]) => [field, reader(type)]);
      const object = {};
      fieldReaders.forEach(([field, read], n) => { object[field] = read(values[n]); });
      return object;
    };
  }
  return readers[packed.type](packed.value);
}

const SVG = 'http://www.w3.org/2000/svg';

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (name === 'style') for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else element.setAttribute(name, value === true ? '' : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

const body = id => document.querySelector(`#${id} > .body`);

function replaceBody(id, ...children) {
  body(id).replaceChildren(...children.flat(Infinity).filter(Boolean));
}

function say(text) {
  document.getElementById('status').textContent = text;
}

// A table that scrolls, by mouse or keyboard, if it is wider than the page.
function scrolling(label, ...rows) {
  const table = el('table', {}, el('caption', {}, label), rows);
  return el('div', {class: 'scroll', tabindex: '0', role: 'region', 'aria-label': label}, table);
}

// ---- Figures

function significant(value) {
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return value.toFixed(digits);
}

function bytes(count) {
  const sign = count < 0 ? '−' : '';
  let value = Math.abs(count);
  if (value < 1024) return `${sign}${value} B`;
  const units = ['KiB', 'MiB', 'GiB', 'TiB', 'PiB'];
  let unit = -1;
  do { value /= 1024; unit += 1; } while (value >= 999.5 && unit < units.length - 1);
  return `${sign}${significant(value)} ${units[unit]}`;
}

function time(seconds) {
  const sign = seconds < 0 ? '−' : '';
  const value = Math.abs(seconds);
  if (value === 0) return '0 s';
  for (const [unit, factor] of [['s', 1], ['ms', 1e3], ['µs', 1e6]]) {
    if (value * factor >= 0.9995) return `${sign}${significant(value * factor)} ${unit}`;
  }
  return `${sign}${significant(value * 1e9)} ns`;
}

const more = (value, text) => (value < 0 ? text(value) : `+${text(value)}`);
function percent(value) {
  if (value && Math.abs(value) < 5e-5) return `${value < 0 ? '−' : ''}< 0.01 %`;
  return `${(100 * value).toFixed(Math.abs(value) < 0.0995 ? 2 : 1)} %`;
}
const count = (number, what) => `${number} ${what}${number === 1 ? '' : what.endsWith('s') ? 'es' : 's'}`;
const sum = (values, of = value => value) => values.reduce((total, value) => total + of(value), 0);

// Whether a difference from the plan is within the rounding of its figures.
const isSame = (difference, whole) => Math.abs(difference) <= 1e-6 * Math.abs(whole);

// ---- Names

// Numbers in names count as numbers. One collator for all: making one takes longer than most comparisons.
const byName = new Intl.Collator('en', {numeric: true}).compare;

const shapeText = tensor => `[${(tensor.written.length ? tensor.written : tensor.shape).join(', ')}]`;
const nameOf = tensor => tensor.label || tensor.name;
// A path with its numbers replaced: layers.*.up for layers.3.up.
const patternOf = path => path.replace(/\.\d+(?=\.|$)/g, '.*');

function operatorName(operator) {
  return operator.label ? `${operator.kind} ${operator.index} (${operator.label})` : `${operator.kind} ${operator.index}`;
}
