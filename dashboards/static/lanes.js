// The step timeline: zooming and moving by buttons, keys and wheel, the way to the longest gaps, names in wide cells.
"use strict";

(() => {
  const NARROWEST_MS = 2e-4;
  const LABEL_PX = 44;
  const LETTER_PX = 6.3;
  const MAX_LABELS = 150;
  const KEYS = {
    ArrowLeft: "left", ArrowRight: "right", "+": "in", "=": "in", "-": "out", "0": "all", Home: "all",
    n: "gap", p: "gap-before", s: "step", w: "in", a: "left", d: "right",
  };

  // --- cells, and what they say, from the columns of spans ---------------------------------------

  function shortTime(ns) {
    for (const [unit, size] of [["s", 1e9], ["ms", 1e6], ["µs", 1e3]]) {
      if (ns < 0.9995 * size) continue;
      const value = Math.max(1, ns / size);
      return `${value < 999.5 ? value.toPrecision(3) : Math.round(value).toLocaleString("en-US")} ${unit}`;
    }
    return `${ns} ns`;
  }

  function said(row, span, kind) {
    const [name, length, count] = [row.names[row.name[span]], shortTime(row.length_ns[span]), row.num_events[span]];
    const title = name ? `<b>${name}</b><br>${kind}` : `<b>${kind}</b>`;
    if (count === 1) return `${title}<br>${length}`;
    return `${title}, mostly<br>${length}: ${count} events in ${shortTime(row.busy_ns[span])}`;
  }

  // Cells tile the row: one a span, and one without a colour where nothing ran.
  function cellsOf(row, kinds) {
    let end = row.start_ns;
    const [edges, codes, texts] = [[end / 1e6], [], []];
    const add = (length, code, text) => {
      end += length;
      edges.push(end / 1e6);
      codes.push(code);
      texts.push(text);
    };
    row.length_ns.forEach((length, span) => {
      if (row.gap_ns[span]) add(row.gap_ns[span], NaN, "");
      const code = row.category[span];
      add(length, code, said(row, span, kinds[code]));
    });
    // Typed arrays: Plotly looks at others one by one.
    return {x: Float64Array.from(edges), z: [Float32Array.from(codes)], text: [texts]};
  }

  steptune.prepare.lanes = ({data, layout}) => {
    for (const trace of data) if (trace.type === "heatmap") Object.assign(trace, cellsOf(trace.meta, layout.meta.kinds));
  };

  // --- moving about --------------------------------------------------------------------------------

  function attach(plot) {
    const frame = plot.closest(".timeline");
    const section = plot.closest("section");
    const says = frame.querySelector(".where");
    const axis = plot.layout.xaxis;
    const [first, last] = [axis.minallowed, axis.maxallowed];
    const gaps = [...section.querySelectorAll("button.gap")];
    const steps = (plot.data.find(trace => trace.type === "scatter") || {x: []}).x.filter((value, place) => place % 3 === 0);
    const lanes = plot._fullData.filter(trace => trace.type === "heatmap");
    let gap = -1;

    const range = () => plot.layout.xaxis.range.map(Number);

    function show(low, high, more = {}) {
      let width = Math.min(last - first, Math.max(NARROWEST_MS, high - low));
      low = Math.max(first, Math.min(low, last - width));
      return Plotly.relayout(plot, {"xaxis.range": [low, low + width], ...more});
    }

    function zoom(factor, at) {
      const [low, high] = range();
      const centre = at === undefined ? (low + high) / 2 : at;
      return show(centre - (centre - low) * factor, centre + (high - centre) * factor);
    }

    function move(share) {
      const [low, high] = range();
      const by = (high - low) * share;
      return show(low + by, high + by);
    }

    function goToGap(button) {
      gap = gaps.indexOf(button);
      const [from, to] = [Number(button.dataset.from), Number(button.dataset.to)];
      const [low, high] = plot.layout.yaxis.range.map(Number);
      const mark = {
        type: "rect", x0: from, x1: to, y0: low, y1: high, layer: "above",
        line: {color: "#d6249f", width: 1.5, dash: "dot"}, fillcolor: "rgba(214, 36, 159, .07)",
      };
      says.textContent = `Gap ${gap + 1} of ${gaps.length}: ${button.dataset.said}`;
      return show(from - 0.75 * (to - from), to + 0.75 * (to - from), {shapes: [mark]});
    }

    function nextStep() {
      const [low, high] = range();
      if (high - low > 0.999 * (last - first)) return goToStep(0);
      const place = steps.findIndex((edge, number) => number < steps.length - 1 && edge > low + (last - first) * 1e-6);
      return goToStep(Math.max(0, place));
    }

    function goToStep(number) {
      says.textContent = `Step ${number + 1} of ${steps.length - 1}`;
      return show(steps[number], steps[number + 1]);
    }

    const actions = {
      in: () => zoom(0.5), out: () => zoom(2), left: () => move(-0.3), right: () => move(0.3), step: nextStep,
      all: () => { says.textContent = ""; return show(first, last, {shapes: []}); },
      gap: () => gaps.length && goToGap(gaps[(gap + 1) % gaps.length]),
      "gap-before": () => gaps.length && goToGap(gaps[(gap - 1 + gaps.length) % gaps.length]),
    };

    frame.addEventListener("click", event => {
      const button = event.target.closest("button[data-do]");
      if (button) actions[button.dataset.do]();
    });
    frame.addEventListener("keydown", event => {
      const action = KEYS[event.key];
      if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      actions[action]();
    });
    for (const button of gaps) button.addEventListener("click", () => {
      goToGap(button);
      frame.scrollIntoView({block: "center", behavior: "instant"});
    });
    plot.addEventListener("wheel", event => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      event.stopPropagation();
      const box = plot.querySelector(".nsewdrag").getBoundingClientRect();
      const [low, high] = range();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, low + (high - low) * (event.clientX - box.left) / box.width);
    }, {passive: false, capture: true});

    // --- names in cells that are wide enough -------------------------------------------------

    function plainText(text) {
      const name = (text.match(/<b>(.*?)<\/b>/) || ["", ""])[1];
      return name.replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");
    }

    function escaped(text) {
      return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
    }

    function firstAfter(edges, value) {
      let [low, high] = [0, edges.length];
      while (low < high) {
        const middle = (low + high) >> 1;
        if (edges[middle] <= value) low = middle + 1; else high = middle;
      }
      return low;
    }

    function labels() {
      const [low, high] = range();
      const perMs = plot._fullLayout.xaxis._length / (high - low);
      const found = [];
      for (const lane of lanes) {
        const edges = lane.x;
        for (let cell = Math.max(0, firstAfter(edges, low) - 1); cell < edges.length - 1 && edges[cell] < high; cell++) {
          const code = lane.z[0][cell];
          if (!Number.isFinite(code)) continue;
          const [from, to] = [Math.max(low, edges[cell]), Math.min(high, edges[cell + 1])];
          const width = (to - from) * perMs;
          if (width < LABEL_PX) continue;
          const fits = Math.floor((width - 6) / LETTER_PX);
          const name = plainText(lane.text[0][cell]);
          found.push({width, label: {
            x: (from + to) / 2, y: (lane.y[0] + lane.y[1]) / 2, showarrow: false, captureevents: false,
            text: escaped(name.length <= fits ? name : `${name.slice(0, fits - 1)}…`),
            font: {size: 11, color: plot.layout.meta.text_colours[code]},
          }});
        }
      }
      found.sort((one, other) => other.width - one.width);
      return found.slice(0, MAX_LABELS).map(item => item.label);
    }

    let shown = "";
    function relabel() {
      const key = `${range()} ${plot._fullLayout.xaxis._length}`;
      if (key === shown) return;
      shown = key;
      Plotly.relayout(plot, {annotations: labels()});
    }
    plot.on("plotly_relayout", relabel);
    relabel();
  }

  document.addEventListener("figure-drawn", event => {
    if (event.target.dataset.figure === "lanes") attach(event.detail);
  });
  // Buttons that lead into the timeline work before it has been drawn.
  document.addEventListener("click", event => {
    const button = event.target.closest("button.gap");
    const figure = button && button.closest("section").querySelector('[data-figure="lanes"]');
    if (!figure || figure.drawn !== undefined) return;
    figure.addEventListener("figure-drawn", () => setTimeout(() => button.click()), {once: true});
    steptune.draw(figure);
  });
})();
