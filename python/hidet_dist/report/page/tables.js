// Tables that are sorted by their headings and filtered by text. Rows are drawn in portions.

const ROWS_AT_ONCE = 60;

// columns: {title, cell(row), sort(row)?, number?, wide?}; options: {caption, filter(row) => text, sorted: column
// number, details(row) => element}.
function dataTable(rows, columns, options) {
  let order = options.sorted === undefined ? null : {column: options.sorted, descending: true};
  let shown = ROWS_AT_ONCE;
  let filter = '';
  const tbody = el('tbody');
  const heads = columns.map((column, n) => {
    const label = column.sort ? el('button', {type: 'button', onclick: () => sortBy(n)}, column.title) : column.title;
    return el('th', {scope: 'col', class: column.number ? 'number' : null}, label);
  });
  const rest = el('button', {type: 'button', class: 'more', onclick: () => { shown += 10 * ROWS_AT_ONCE; draw(); }});
  const matches = el('span', {class: 'matches'});

  function sortBy(n) {
    const first = columns[n].number ? true : false;
    order = {column: n, descending: order && order.column === n ? !order.descending : first};
    draw();
    say(`Sorted by ${columns[n].title}, ${order.descending ? 'descending' : 'ascending'}`);
  }

  function draw() {
    let listed = filter ? rows.filter(row => options.filter(row).toLowerCase().includes(filter)) : rows;
    if (order) {
      const key = columns[order.column].sort;
      const sign = order.descending ? -1 : 1;
      listed = [...listed].sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        return sign * (typeof x === 'string' ? byName(x, y) : x - y);
      });
    }
    heads.forEach((head, n) => {
      if (order && order.column === n) head.setAttribute('aria-sort', order.descending ? 'descending' : 'ascending');
      else head.removeAttribute('aria-sort');
    });
    tbody.replaceChildren(...listed.slice(0, shown).flatMap(row => tableRow(row, columns, options)));
    rest.hidden = listed.length <= shown;
    rest.textContent = `Show more: ${listed.length - shown} of ${listed.length} rows are not shown`;
    matches.textContent = filter ? `${listed.length} of ${rows.length}` : '';
  }

  const table = el('table', {}, el('caption', {}, options.caption), el('thead', {}, el('tr', {}, heads)), tbody);
  const parts = [el('div', {class: 'scroll', tabindex: '0', role: 'region', 'aria-label': options.caption}, table), rest];
  if (options.filter && rows.length > 8) {
    const input = el('input', {
      type: 'search', placeholder: options.hint || 'Filter', 'aria-label': `Filter: ${options.caption}`,
      oninput: event => { filter = event.target.value.trim().toLowerCase(); shown = ROWS_AT_ONCE; draw(); },
    });
    parts.unshift(el('div', {class: 'filter'}, input, matches));
  }
  draw();
  return el('div', {class: 'data-table'}, parts);
}

// How values of fields are shown that are columns as they are.
const FORMS = {
  text: {cell: value => value},
  code: {cell: value => el('code', {}, value)},
  count: {number: true, cell: value => String(value)},
  bytes: {number: true, cell: value => bytes(value)},
  time: {number: true, cell: value => time(value)},
};

// The column of a field, by its name, heading and form.
const fieldColumn = ([field, title, form]) => ({
  title, number: FORMS[form].number, sort: row => row[field], cell: row => FORMS[form].cell(row[field]),
});

function tableRow(row, columns, options) {
  const cells = columns.map((column, n) => {
    const content = column.cell(row);
    return n === 0 ? el('th', {scope: 'row'}, content) : el('td', {class: column.number ? 'number' : null}, content);
  });
  const line = el('tr', {}, cells);
  if (!options.details) return [line];
  const holder = el('td', {colspan: columns.length});
  const below = el('tr', {class: 'details', hidden: true}, holder);
  const toggle = el('button', {
    type: 'button', class: 'toggle', 'aria-expanded': 'false', 'aria-label': 'Details', onclick: () => {
      const opens = below.hidden;
      if (opens && !holder.hasChildNodes()) holder.append(options.details(row));
      below.hidden = !opens;
      toggle.setAttribute('aria-expanded', String(opens));
    },
  });
  cells[0].prepend(toggle);
  return [line, below];
}
