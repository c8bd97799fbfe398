// Sorts and searches tables, and copies texts and the data of figures. What a reader chose stays when a section is
// brought up to date.
"use strict";

(() => {
  const SEARCHED_FROM = 8;  // rows: fewer are seen at a glance
  const TIMES = {ns: 1e-9, "µs": 1e-6, ms: 1e-3, s: 1, min: 60, h: 3600};
  const PREFIXES = {k: 1e3, K: 1e3, M: 1e6, G: 1e9, T: 1e12, P: 1e15, Ki: 2 ** 10, Mi: 2 ** 20, Gi: 2 ** 30, Ti: 2 ** 40};
  const chosen = new Map();  // by table: {column, direction, text}

  // `ms`; `k`, `MiB` and `TFLOP/s` by their prefix; 1 of any other word.
  function sizeOf(unit) {
    return TIMES[unit] ?? PREFIXES[unit.match(/^([kKMGTP]i?)(?=B|FLOP|$)/)?.[1]] ?? 1;
  }

  // `7 min 42 s`, `1.43 GiB`, `12k`, `2.42×`, `−14.50`, `1.2e-05`: in the base unit; NaN of a text that begins otherwise.
  function numberIn(text) {
    const found = [...text.matchAll(/([-−+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?)\s*([A-Za-zµ/]*)/g)];
    if (!found.length || !/^\s*[-−+]?\d/.test(text)) return NaN;
    const value = match => Number(match[1].replace("−", "-").replaceAll(",", "")) * sizeOf(match[2]);
    const continued = ["h", "min"].includes(found[0][2]) && found[1]?.[2] in TIMES;
    return value(found[0]) + (continued ? value(found[1]) : 0);
  }

  // By number where both are one; a cell without any is last in either direction.
  function compare(one, other, direction) {
    const a = numberIn(one), b = numberIn(other);
    if (!Number.isNaN(a) && !Number.isNaN(b)) return direction * (a - b);
    if (Number.isNaN(a) !== Number.isNaN(b)) return Number.isNaN(a) ? 1 : -1;
    return direction * one.localeCompare(other);
  }

  // By its headings: the same after a refresh that puts another table before it.
  function keyOf(table) {
    const place = table.closest("[id]:not(table)"), headings = table.tHead.textContent;
    const alike = [...place.querySelectorAll("table")].filter(other => other.tHead?.textContent === headings);
    return `${place.id}/${headings}/${alike.indexOf(table)}`;
  }

  function textAt(row, column) {
    let end = 0;
    const cell = [...row.cells].find(one => (end += one.colSpan) > column);
    return cell?.dataset.value ?? (cell?.innerText ?? "").trim();
  }

  function apply(table) {
    const {column, direction, text} = chosen.get(keyOf(table)) ?? {};
    const body = table.tBodies[0];
    const rows = [...body.rows].filter(row => !row.classList.contains("total"));
    if (column !== undefined) {
      const texts = new Map(rows.map(row => [row, textAt(row, column)]));
      rows.sort((a, b) => compare(texts.get(a), texts.get(b), direction));
      body.prepend(...rows);
      [...table.tHead.rows[0].cells].forEach((head, number) => {
        if (number === column) head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
        else head.removeAttribute("aria-sort");
      });
    }
    if (text === undefined) return;
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const said = row.textContent.toLowerCase();
      row.hidden = !words.every(word => said.includes(word));
    }
    if (!table.says) return;
    table.says.textContent = words.length ? `${rows.filter(row => !row.hidden).length} of ${rows.length}` : "";
  }

  function change(table, changes) {
    chosen.set(keyOf(table), {...chosen.get(keyOf(table)), ...changes});
    apply(table);
  }

  function sortable(table) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      if (!head.textContent.trim() || head.querySelector("button, input")) return;
      const button = document.createElement("button");
      Object.assign(button, {type: "button", className: "sort"});
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const before = head.getAttribute("aria-sort");
        const first = head.classList.contains("number") ? "descending" : "ascending";
        const next = before === null ? first : before === "ascending" ? "descending" : "ascending";
        change(table, {column, direction: next === "ascending" ? 1 : -1});
      });
    });
  }

  function nameOf(table) {
    return table.caption?.textContent.trim() || table.closest(".scroll")?.ariaLabel
      || table.closest("details, section")?.querySelector("summary, h2, h3")?.textContent.trim() || "this table";
  }

  function searchable(table) {
    const line = document.createElement("p"), field = document.createElement("input");
    Object.assign(field, {type: "search", placeholder: "Search these rows", autocomplete: "off"});
    field.setAttribute("aria-label", `Search: ${nameOf(table)}`);
    field.value = chosen.get(keyOf(table))?.text ?? "";
    field.addEventListener("input", () => change(table, {text: field.value}));
    table.says = document.createElement("span");
    table.says.className = "small soft";
    table.says.setAttribute("role", "status");
    line.className = "search";
    line.append(field, table.says);
    (table.closest(".scroll") ?? table).before(line);
  }

  function equip(root) {
    for (const table of root.querySelectorAll("table")) {
      if (table.equipped || table.dataset.served !== undefined || !table.tHead || !table.tBodies.length) continue;
      const number = table.tBodies[0].rows.length;
      if (number < 2) continue;
      table.equipped = true;
      sortable(table);
      if (number >= SEARCHED_FROM) searchable(table);
      apply(table);
    }
  }

  const NUMBERS = {
    f8: Float64Array, f4: Float32Array, i4: Int32Array, u4: Uint32Array, i2: Int16Array, u2: Uint16Array,
    i1: Int8Array, u1: Uint8Array,
  };

  // A column of a figure's data, which Plotly may have packed.
  function listed(values) {
    if (!values?.bdata) return Array.isArray(values) ? values : null;
    const bytes = Uint8Array.from(atob(values.bdata), letter => letter.charCodeAt(0));
    return [...new NUMBERS[values.dtype](bytes.buffer)];
  }

  const plain = value => String(value ?? "").replaceAll(/<br\s*\/?>/g, " ").replaceAll(/<[^>]+>/g, "");
  const quoted = value => /[",\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value;

  // Every trace of a figure, one line a point.
  function csvOf(info) {
    const names = ["x", "y", "z", "base", "labels", "parents", "values", "text", "customdata"];
    const traces = info.data.map(trace => ({
      name: trace.name ?? "",
      columns: Object.fromEntries([
        ...names.map(name => [name, listed(trace[name])]),
        ["error_above", listed(trace.error_x?.array ?? trace.error_y?.array)],
        ["error_below", listed(trace.error_x?.arrayminus ?? trace.error_y?.arrayminus)],
      ].filter(([, values]) => values)),
    }));
    const used = [...new Set(traces.flatMap(trace => Object.keys(trace.columns)))];
    const lines = [["series", ...used]];
    for (const {name, columns} of traces) {
      const length = Math.max(0, ...Object.values(columns).map(values => values.length));
      for (let place = 0; place < length; place += 1) lines.push([name, ...used.map(column => columns[column]?.[place])]);
    }
    return lines.map(line => line.map(value => quoted(plain(value))).join(",")).join("\n") + "\n";
  }

  async function copied(text) {
    if (navigator.clipboard) {
      try { await navigator.clipboard.writeText(text); return true; } catch { /* not allowed: by the older way */ }
    }
    const area = document.createElement("textarea");
    area.value = text;
    area.style.position = "fixed";
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }

  document.addEventListener("click", async event => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    const figure = button.closest(".figure");
    const text = figure
      ? csvOf(JSON.parse(figure.querySelector(".plot-data").textContent))
      : button.closest(".copyable").querySelector("code").textContent;
    const label = button.textContent;
    button.textContent = await copied(text) ? "Copied" : "Not allowed";
    button.focus({preventScroll: true});
    setTimeout(() => { button.textContent = label; }, 1500);
  });
  document.addEventListener("section-replaced", event => equip(event.target));
  steptune.ready(() => equip(document));
})();
