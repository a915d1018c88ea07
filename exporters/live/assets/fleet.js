// The fleet table: found by words, narrowed to what is doubtful, sorted by any column; all of it survives an update.
const text = (cell) => cell.textContent.trim().toLowerCase();

export class FleetTable {
  constructor() {
    this.table = document.getElementById("fleet");
    this.filter = document.getElementById("fleet-filter");
    this.doubtful = document.getElementById("fleet-doubtful");
    this.sorted = {column: -1, direction: 1};
    this.filter.addEventListener("input", () => this.arrange());
    this.doubtful.addEventListener("change", () => this.arrange());
    [...this.table.tHead.rows[0].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      button.addEventListener("click", () => this.sort(column));
      head.replaceChildren(button);
    });
  }

  sort(column) {
    const again = this.sorted.column === column;
    this.sorted = {column, direction: again ? -this.sorted.direction : 1};
    [...this.table.tHead.rows[0].cells].forEach((head, k) => {
      if (k === column) head.setAttribute("aria-sort", this.sorted.direction > 0 ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    });
    this.arrange();
  }

  arrange() {
    const body = this.table.tBodies[0];
    const rows = [...body.rows];
    if (this.sorted.column >= 0) {
      const sorted = [...rows].sort((a, b) => this.compare(a.cells[this.sorted.column], b.cells[this.sorted.column]));
      if (sorted.some((row, k) => row !== rows[k])) body.append(...sorted);
    }
    const words = this.filter.value.trim().toLowerCase();
    let shown = 0;
    for (const row of rows) {
      const wanted = (!words || text(row).includes(words)) && (!this.doubtful.checked || "doubtful" in row.dataset);
      row.hidden = !wanted;
      shown += wanted;
    }
    const count = document.getElementById("fleet-count");
    const says = shown === rows.length ? `${rows.length} targets` : `${shown} of ${rows.length} targets`;
    if (count.textContent !== says) count.textContent = says;
  }

  /** Unknown figures come last either way. */
  compare(a, b) {
    if (!a || !b) return 0;
    const [x, y] = [a.dataset.value, b.dataset.value];
    if (x !== undefined && y !== undefined) return (x - y) * this.sorted.direction;
    if (x !== undefined || y !== undefined) return x === undefined ? 1 : -1;
    return text(a).localeCompare(text(b), undefined, {numeric: true}) * this.sorted.direction;
  }
}
