// Tables that can be sorted by a click on a heading, and searched; a name in the timeline leads to its row.
"use strict";

(() => {
  const SCALES = {n: 1e-9, "µ": 1e-6, m: 1e-3, k: 1e3, K: 1e3, M: 1e6, G: 1e9, T: 1e12, P: 1e15, Ki: 2 ** 10, Mi: 2 ** 20, Gi: 2 ** 30, Ti: 2 ** 40};
  const NUMBER = /^([+\-−]?[\d.,]+)\s*(?:([nµmkKMGTP]i?)(?=[sBF]|$))?/;

  // The number that a cell shows, in the base unit: 1.5 ms before 900 µs. Nothing sorts last.
  function valueOf(cell) {
    const text = cell.textContent.trim();
    const found = text.match(NUMBER);
    if (!found) return -Infinity;
    return Number(found[1].replaceAll(",", "").replace("−", "-")) * (SCALES[found[2]] ?? 1);
  }

  function sort(table, column, heading) {
    const down = heading.getAttribute("aria-sort") === "descending";
    const numbers = heading.classList.contains("number");
    const up = numbers ? down : heading.getAttribute("aria-sort") !== "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", up ? "ascending" : "descending");
    const body = table.tBodies[0], rows = [...body.rows];
    const keys = new Map(rows.map(row => [row, numbers ? valueOf(row.cells[column]) : row.cells[column].textContent.trim()]));
    const compare = numbers
      ? (one, other) => (keys.get(one) === keys.get(other) ? 0 : keys.get(one) - keys.get(other))
      : (one, other) => keys.get(one).localeCompare(keys.get(other));
    body.append(...rows.sort((one, other) => (up ? 1 : -1) * compare(one, other)));
  }

  function makeSortable(table) {
    [...table.tHead.rows[0].cells].forEach((heading, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.append(...heading.childNodes);
      heading.append(button);
      button.addEventListener("click", () => sort(table, column, heading));
    });
  }

  function search(table, text, says) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0;
    for (const row of table.tBodies[0].rows) {
      const content = row.textContent.toLowerCase();
      row.hidden = !words.every(word => content.includes(word));
      found += !row.hidden;
    }
    says.textContent = words.length ? `${found} of ${table.tBodies[0].rows.length}` : "";
  }

  function makeSearchable(table) {
    const frame = table.closest(".scroll"), name = frame.getAttribute("aria-label");
    const line = document.createElement("p"), input = document.createElement("input"), says = document.createElement("span");
    line.className = "search";
    Object.assign(input, {type: "search", placeholder: `Search ${name.toLowerCase()}`});
    input.setAttribute("aria-label", `Search ${name.toLowerCase()}`);
    says.className = "small soft";
    says.setAttribute("role", "status");
    line.append(input, says);
    frame.before(line);
    input.addEventListener("input", () => search(table, input.value, says));
  }

  function prepare() {
    for (const table of document.querySelectorAll("table.sortable, table.searchable")) {
      if (table.dataset.prepared) continue;
      table.dataset.prepared = "yes";
      if (table.matches(".sortable")) makeSortable(table);
      if (table.matches(".searchable")) makeSearchable(table);
    }
  }
  steptune.ready(prepare);
  document.addEventListener("page-refreshed", prepare);

  // A name that was clicked in the timeline: a button beside it leads to its row.
  document.addEventListener("span-picked", event => {
    const frame = event.target, says = frame.querySelector(".where");
    const row = [...frame.closest(".trial, main").querySelectorAll("button.events")]
      .find(button => button.dataset.name === event.detail)?.closest("tr");
    if (!row) return;
    const button = document.createElement("button");
    Object.assign(button, {type: "button", className: "link", textContent: "show in the tables"});
    button.addEventListener("click", () => {
      row.hidden = false;
      for (let around = row.closest("details"); around; around = around.parentElement.closest("details")) around.open = true;
      row.scrollIntoView({block: "center", behavior: "instant"});
      row.querySelector("button.events").focus({preventScroll: true});
    });
    says.append(" · ", button);
  });
})();
