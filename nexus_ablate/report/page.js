// A click on a column's head sorts its table; a second one turns it round. Empty cells stay last.
for (const head of document.querySelectorAll('th[data-by]')) {
  const sort = () => {
    const body = head.closest('table').tBodies[0];
    const at = head.cellIndex;
    const down = head.getAttribute('aria-sort') === 'ascending';
    for (const other of head.parentNode.children) other.removeAttribute('aria-sort');
    head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    const value = row => row.cells[at].dataset.v;
    const rows = [...body.rows].sort((a, b) => {
      const x = value(a), y = value(b);
      if (x === '' || y === '') return (x === '') - (y === '');
      const order = head.dataset.by === 'number' ? x - y : x.localeCompare(y);
      return down ? -order : order;
    });
    body.append(...rows);
  };
  head.tabIndex = 0;
  head.addEventListener('click', sort);
  head.addEventListener('keydown', e => { if (e.key === 'Enter') sort(); });
}
addEventListener('beforeprint', () => document.querySelectorAll('details').forEach(d => d.open = true));

// A table that doesn't fit the page becomes one block per row, each number below its head.
const fit = () => {
  const closed = document.querySelectorAll('details:not([open])');  // what is hidden has no width
  for (const box of closed) box.open = true;
  for (const box of document.querySelectorAll('.scroll')) {
    const table = box.querySelector('table');
    if (!table) continue;
    table.classList.remove('stacked');
    if (table.scrollWidth > box.clientWidth) table.classList.add('stacked');
  }
  for (const box of closed) box.open = false;
};
fit();
addEventListener('resize', fit);
