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
