// The step timeline: tiles of lanes, painted so that the height of a colour in a column is its share of that time.
"use strict";

(() => {
  const NARROWEST_NS = 200;
  const LABEL_PX = 44;
  const FULL = 0.999;
  const KEPT_TILES = 48;
  const MAX_LEVEL = 30;
  const AXIS_PX = 26;
  const SPACE_PX = 8;
  const HEIGHTS = {device: 40, stream: 26, thread: 26};
  const STEP_COLOUR = "#d6249f";
  const KEYS = {
    ArrowLeft: "left", ArrowRight: "right", "+": "in", "=": "in", "-": "out", "0": "all", Home: "all",
    n: "gap", p: "gap-before", s: "step", w: "in", a: "left", d: "right", Escape: "unpick",
  };

  function shortTime(ns) {
    for (const [unit, size] of [["s", 1e9], ["ms", 1e6], ["µs", 1e3]]) {
      if (ns < 0.9995 * size) continue;
      const value = Math.max(1, ns / size);
      return `${value < 999.5 ? value.toPrecision(3) : Math.round(value).toLocaleString("en-US")} ${unit}`;
    }
    return `${Math.round(ns)} ns`;
  }

  const percent = share => `${share < 0.0995 ? (100 * share).toPrecision(2) : Math.round(100 * share)} %`;

  // --- where tiles come from ---------------------------------------------------------------------

  // The last cell that begins at or before a moment.
  function lastBefore(starts, value) {
    let [low, high] = [0, starts.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (starts[middle] <= value) low = middle + 1; else high = middle;
    }
    return low - 1;
  }

  function prepared(tile) {
    for (const lane of tile.lanes) {
      let reach = -Infinity;
      lane.reach = lane.start_ns.map((start, cell) => (reach = Math.max(reach, start + lane.length_ns[cell])));
    }
    return tile;
  }

  // All lanes at once, from the page itself.
  class Held {
    constructor(text) { this.text = text; }

    async root() {
      const bytes = Uint8Array.from(atob(this.text), letter => letter.charCodeAt(0));
      const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
      this.tile = prepared(JSON.parse(await new Response(plain).text()));
      return this.tile;
    }

    covering() { return [this.tile]; }

    async places(name) {
      const found = [];
      for (const lane of this.tile.lanes) {
        const code = lane.names.indexOf(name);
        if (code < 0) continue;
        lane.name.forEach((other, cell) => {
          if (other === code) found.push({lane: lane.label, start_ns: lane.start_ns[cell], length_ns: lane.length_ns[cell]});
        });
      }
      return found.sort((one, other) => other.length_ns - one.length_ns || one.start_ns - other.start_ns).slice(0, 100);
    }
  }

  // As many as are needed for what is shown, from the service.
  class Asked {
    constructor(path, changed) {
      Object.assign(this, {path, changed, tiles: new Map()});
    }

    async get(query) {
      const answer = await steptune.call("GET", `${this.path}${query}`);
      if (!answer.ok) throw new Error(answer.status === 404 ? "the profile has no timeline" : `the service answered ${answer.status}`);
      return answer.json();
    }

    async root() {
      const tile = prepared(await this.get("/lanes?level=0&tile=0"));
      this.tiles.set("0/0", tile);
      return tile;
    }

    // The best tiles that are here for a stretch of time; better ones are asked for.
    covering(low, high, first, last) {
      const level = Math.min(MAX_LEVEL, Math.max(0, Math.ceil(Math.log2((last - first) / (high - low)))));
      const width = (last - first) / 2 ** level;
      const from = Math.max(0, Math.floor((low - first) / width));
      const to = Math.min(2 ** level - 1, Math.floor((high - first) / width));
      const found = [];
      for (let number = from; number <= to; number++) {
        const tile = this.best(level, number);
        found.push({...tile, low_ns: Math.max(tile.low_ns, first + number * width),
          high_ns: Math.min(tile.high_ns, first + (number + 1) * width)});
      }
      return found;
    }

    best(level, number) {
      let known;
      for (let up = 0; up <= level && !known; up++) known = this.tiles.get(`${level - up}/${Math.floor(number / 2 ** up)}`);
      const key = `${level}/${number}`;
      if (!known.exact && !this.tiles.has(key)) this.ask(key, level, number);
      return known;
    }

    async ask(key, level, number) {
      this.waiting ??= new Set();
      if (this.waiting.has(key)) return;
      this.waiting.add(key);
      try {
        this.tiles.set(key, prepared(await this.get(`/lanes?level=${level}&tile=${number}`)));
        const old = [...this.tiles.keys()].find(other => other !== "0/0" && other !== key);
        if (this.tiles.size > KEPT_TILES) this.tiles.delete(old);
        this.changed();
      } catch (error) {
        console.warn("a part of the timeline did not come", error);
      } finally {
        this.waiting.delete(key);
      }
    }

    async places(name) {
      return (await this.get(`/spans?name=${encodeURIComponent(name)}`)).spans;
    }
  }

  // --- painting ------------------------------------------------------------------------------------

  const channels = colour => [1, 3, 5].map(place => parseInt(colour.slice(place, place + 2), 16));
  // Pixels are little-endian everywhere that browsers run.
  const packed = ([red, green, blue], alpha = 255) => ((alpha << 24) | (blue << 16) | (green << 8) | red) >>> 0;

  // Calls back for every cell of a lane in a stretch of time.
  function eachCell(lane, low, high, visit) {
    let cell = Math.max(0, lastBefore(lane.reach, low));
    while (cell < lane.reach.length && lane.reach[cell] <= low) cell++;
    for (; cell < lane.start_ns.length && lane.start_ns[cell] < high; cell++) visit(cell);
  }

  // The share of each column that is of each category: a row of numbers by category.
  function shares(tiles, row, view, width, picked) {
    const found = new Map();
    const perNs = width / (view.high - view.low);
    for (const tile of tiles) {
      const lane = tile.lanes[row];
      const [low, high] = [Math.max(view.low, tile.low_ns), Math.min(view.high, tile.high_ns)];
      eachCell(lane, low, high, cell => {
        const length = lane.length_ns[cell];
        const from = (Math.max(low, lane.start_ns[cell]) - view.low) * perNs;
        const to = (Math.min(high, lane.start_ns[cell] + length) - view.low) * perNs;
        if (to <= from) return;
        const faded = picked !== "" && lane.names[lane.name[cell]] !== picked;
        const key = `${faded ? "-" : "+"}${lane.categories[lane.category[cell]]}`;
        if (!found.has(key)) found.set(key, new Float32Array(width));
        const columns = found.get(key), busy = lane.busy_ns[cell] / length;
        const last = Math.min(width - 1, Math.ceil(to) - 1);
        for (let column = Math.floor(from); column <= last; column++) {
          columns[column] += busy * (Math.min(column + 1, to) - Math.max(column, from));
        }
      });
    }
    return found;
  }

  class Timeline {
    constructor(frame) {
      Object.assign(this, JSON.parse(frame.querySelector(".timeline-info").textContent));
      const held = frame.querySelector(".timeline-data");
      this.frame = frame;
      this.section = frame.closest("section");
      this.canvas = frame.querySelector("canvas");
      this.tip = frame.querySelector(".tip");
      this.says = frame.querySelector(".where");
      this.gaps = [...this.section.querySelectorAll("button.gap")];
      this.colours = Object.fromEntries(Object.entries(this.kinds).map(([name, kind]) => [name, channels(kind.colour)]));
      this.gap = -1;
      this.picked = "";
      this.places = [];
      this.source = held ? new Held(held.textContent) : new Asked(this.path, () => this.paint());
    }

    async start() {
      try {
        const root = await this.source.root();
        this.first = Math.min(root.first_ns, this.steps[0]);
        this.last = Math.max(root.last_ns, this.steps[this.steps.length - 1]);
        this.extent = [root.first_ns, root.last_ns];
        this.rows = root.lanes.map(({label, kind}) => ({label, kind}));
        this.legend(root);
      } catch (error) {
        this.says.textContent = `The timeline could not be shown: ${error.message}.`;
        return;
      }
      this.view = {low: this.first, high: this.last};
      this.listen();
      new ResizeObserver(() => this.paint()).observe(this.canvas.parentElement);
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paint());
      this.paint();
      this.frame.dataset.drawn = "yes";
    }

    legend(root) {
      const used = new Set(root.lanes.flatMap(lane => lane.categories));
      const known = Object.keys(this.kinds);
      const names = [...known.filter(name => used.has(name)), ...[...used].filter(name => !known.includes(name))];
      this.frame.querySelector(".legend").prepend(...names.map(name => {
        const item = document.createElement("span"), swatch = document.createElement("span");
        swatch.className = name === "unknown" ? "swatch hatched" : "swatch";
        swatch.style.backgroundColor = this.kind(name).colour;
        item.append(swatch, this.kind(name).title);
        return item;
      }));
    }

    kind(name) { return this.kinds[name] || {...this.kinds.unknown, title: name}; }

    layout() {
      const width = Math.max(120, Math.floor(this.canvas.parentElement.clientWidth));
      const left = width < 480 ? 62 : 104;
      let top = 4;
      const lanes = this.rows.map(row => {
        const lane = {top, height: HEIGHTS[row.kind] || HEIGHTS.thread, ...row};
        top += lane.height + SPACE_PX;
        return lane;
      });
      return {width, left, inner: width - left - 2, lanes, height: top + AXIS_PX, bottom: top - SPACE_PX + 3};
    }

    tiles() {
      const {low, high} = this.view, [first, last] = this.extent;
      const [from, to] = [Math.max(low, first), Math.min(high, last)];
      return from < to ? this.source.covering(from, to, first, last) : [];
    }

    paint() {
      if (this.painting) return;
      this.painting = requestAnimationFrame(() => { this.painting = 0; this.draw(); });
    }

    draw() {
      const place = this.placed = this.layout();
      const ratio = Math.min(2, devicePixelRatio || 1);
      const {canvas} = this, pen = canvas.getContext("2d");
      const style = getComputedStyle(this.frame), ink = style.color;
      canvas.width = place.width * ratio;
      canvas.height = place.height * ratio;
      canvas.style.height = `${place.height}px`;
      const soft = style.getPropertyValue("--soft") || ink, rule = style.getPropertyValue("--rule") || ink;
      const tiles = this.tiles(), width = Math.max(1, Math.floor(place.inner * ratio));
      place.lanes.forEach((lane, row) => {
        const found = shares(tiles, row, this.view, width, this.picked);
        const image = this.image(found, width, Math.round(lane.height * ratio));
        pen.putImageData(image, Math.round(place.left * ratio), Math.round(lane.top * ratio));
      });
      pen.scale(ratio, ratio);
      pen.font = `12px ${style.fontFamily}`;
      pen.textBaseline = "middle";
      for (const [row, lane] of place.lanes.entries()) {
        pen.strokeStyle = rule;
        pen.lineWidth = 1;
        pen.strokeRect(place.left - 0.5, lane.top - 0.5, place.inner + 1, lane.height + 1);
        pen.fillStyle = ink;
        pen.textAlign = "right";
        pen.fillText(this.fitted(pen, lane.label, place.left - 10), place.left - 6, lane.top + lane.height / 2);
        this.labels(pen, tiles, row, lane, place);
      }
      this.axis(pen, place, soft, rule);
      this.marks(pen, place);
    }

    // Columns from the bottom up, a colour as high as its share; what is left over is free of colour: nothing ran.
    image(found, width, height) {
      const image = new ImageData(width, height), pixels = new Uint32Array(image.data.buffer);
      const order = [...found.keys()].sort((one, other) => this.rank(one) - this.rank(other));
      const colours = order.map(key => packed(this.colours[key.slice(1)] || this.colours.unknown, key[0] === "-" ? 56 : 255));
      const columns = order.map(key => found.get(key));
      for (let column = 0; column < width; column++) {
        let sum = 0, filled = 0;
        for (let kind = 0; kind < columns.length; kind++) {
          const share = columns[kind][column];
          if (share === 0) continue;
          sum += share;
          const top = sum > FULL ? height : Math.max(filled, Math.round(sum * height), filled === 0 ? 1 : 0);
          for (; filled < Math.min(top, height); filled++) pixels[(height - 1 - filled) * width + column] = colours[kind];
        }
      }
      return image;
    }

    rank(key) {
      const place = Object.keys(this.kinds).indexOf(key.slice(1));
      return (key[0] === "-" ? 1000 : 0) + (place < 0 ? 500 : place);
    }

    labels(pen, tiles, row, lane, place) {
      const perNs = place.inner / (this.view.high - this.view.low);
      pen.textAlign = "center";
      for (const tile of tiles) {
        const cells = tile.lanes[row], longest = LABEL_PX / perNs;
        const [low, high] = [Math.max(this.view.low, tile.low_ns), Math.min(this.view.high, tile.high_ns)];
        eachCell(cells, low, high, cell => {
          if (cells.length_ns[cell] < longest || cells.count[cell] > 1) return;
          // A cell that reaches into two tiles is named once, by the one with its beginning in view.
          const from = Math.max(this.view.low, cells.start_ns[cell]);
          if (from < low) return;
          const to = Math.min(this.view.high, cells.start_ns[cell] + cells.length_ns[cell]);
          const category = cells.categories[cells.category[cell]];
          const name = cells.names[cells.name[cell]] || this.kind(category).title, room = (to - from) * perNs - 8;
          if (room < LABEL_PX - 8 || (this.picked && name !== this.picked)) return;
          pen.fillStyle = this.kind(category).text;
          const middle = place.left + ((from + to) / 2 - this.view.low) * perNs;
          pen.fillText(this.fitted(pen, name, room), middle, lane.top + lane.height / 2);
        });
      }
    }

    fitted(pen, text, room) {
      if (pen.measureText(text.slice(0, 300)).width <= room) return text;
      let shorter = text.slice(0, Math.max(1, Math.floor(room / 5)));
      while (shorter.length > 1 && pen.measureText(`${shorter}…`).width > room) shorter = shorter.slice(0, -1);
      return shorter.length > 1 ? `${shorter}…` : "";
    }

    axis(pen, place, soft, rule) {
      const span = this.view.high - this.view.low, rough = span / Math.max(2, place.inner / 110);
      const power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].map(factor => factor * power).find(value => value >= rough);
      pen.textAlign = "center";
      for (let at = Math.ceil(this.view.low / step) * step; at <= this.view.high; at += step) {
        const x = this.x(at);
        pen.fillStyle = rule;
        pen.fillRect(x, place.bottom, 1, 5);
        pen.fillStyle = soft;
        if (x > place.left + 14 && x < place.left + place.inner - 24) pen.fillText(this.moment(at, step), x, place.bottom + 14);
      }
    }

    moment(ns, step) {
      const [unit, size] = [["s", 1e9], ["ms", 1e6], ["µs", 1e3], ["ns", 1]].find(([, value]) => Math.abs(ns) >= value && step >= value / 1e4) || ["ns", 1];
      const digits = Math.max(0, Math.ceil(-Math.log10(step / size)));
      return `${(ns / size).toFixed(Math.min(6, digits))} ${unit}`;
    }

    marks(pen, place) {
      pen.fillStyle = STEP_COLOUR;
      for (const edge of this.steps) {
        if (edge >= this.view.low && edge <= this.view.high) pen.fillRect(this.x(edge) - 0.75, 0, 1.5, place.bottom);
      }
      for (const stretch of [this.mark, this.drag].filter(Boolean)) {
        const [from, to] = [Math.max(place.left, this.x(stretch.low)), Math.min(place.left + place.inner, this.x(stretch.high))];
        if (to < from) continue;
        pen.strokeStyle = STEP_COLOUR;
        pen.lineWidth = 1.5;
        pen.setLineDash([4, 3]);
        pen.strokeRect(from, 1, Math.max(1, to - from), place.bottom - 2);
        pen.setLineDash([]);
      }
    }

    x(ns) { return this.placed.left + (ns - this.view.low) / (this.view.high - this.view.low) * this.placed.inner; }

    at(x) { return this.view.low + (x - this.placed.left) / this.placed.inner * (this.view.high - this.view.low); }

    // --- what is under the pointer -------------------------------------------------------------------

    // Every cell in the column of a lane that a point is in.
    under(x, y) {
      const row = this.placed.lanes.findIndex(lane => y >= lane.top && y <= lane.top + lane.height);
      if (row < 0 || x < this.placed.left || x > this.placed.left + this.placed.inner) return null;
      const time = this.at(x), width = (this.view.high - this.view.low) / this.placed.inner;
      const cells = [];
      for (const tile of this.tiles()) {
        const lane = tile.lanes[row];
        const [low, high] = [Math.max(time - width / 2, tile.low_ns), Math.min(time + width / 2, tile.high_ns)];
        if (low >= high) continue;
        eachCell(lane, low, high, cell => {
          const end = lane.start_ns[cell] + lane.length_ns[cell];
          if (end <= low) return;
          const inside = Math.min(high, end) - Math.max(low, lane.start_ns[cell]);
          cells.push({
            name: lane.names[lane.name[cell]], category: lane.categories[lane.category[cell]], start: lane.start_ns[cell],
            length: lane.length_ns[cell], count: lane.count[cell], busy: lane.busy_ns[cell],
            share: inside * lane.busy_ns[cell] / lane.length_ns[cell] / width,
          });
        });
      }
      return {row, width, cells: cells.sort((one, other) => other.share - one.share)};
    }

    // Lines of a label: one event, or what a stretch of merged ones is made of.
    told({cells, width}) {
      const [most] = cells;
      if (!most) return ["Nothing ran", ""];
      if (cells.length === 1 && most.count === 1) {
        return [most.name || this.kind(most.category).title, `${this.kind(most.category).title}, ${shortTime(most.length)}`];
      }
      const parts = new Map();
      let count = 0;
      for (const cell of cells) {
        parts.set(cell.category, (parts.get(cell.category) || 0) + cell.share);
        count += cell.count;
      }
      const lines = [...parts].sort((one, other) => other[1] - one[1]).slice(0, 6);
      const idle = 1 - [...parts.values()].reduce((sum, share) => sum + share, 0);
      if (idle > 0.005) lines.push(["", idle]);
      const merged = cells.some(cell => cell.count > 1) ? `about ${count} events, merged` : `${count} events`;
      return [`${shortTime(width)} with ${merged}`,
        ...lines.map(([name, share]) => `${percent(Math.min(1, share))} ${name ? this.kind(name).title : "nothing"}`),
        ...(most.name ? [`longest: ${most.name}`] : [])];
    }

    hover(event) {
      const box = this.canvas.getBoundingClientRect();
      const found = this.under(event.clientX - box.left, event.clientY - box.top);
      this.tip.hidden = !found;
      if (!found) return;
      const [title, ...lines] = this.told(found), strong = document.createElement("strong");
      strong.textContent = title.length > 160 ? `${title.slice(0, 159)}…` : title;
      this.tip.replaceChildren(strong, ...lines.filter(Boolean).map(line => {
        const element = document.createElement("div");
        element.textContent = line.length > 160 ? `${line.slice(0, 159)}…` : line;
        return element;
      }));
      const area = this.canvas.parentElement.getBoundingClientRect();
      const [x, y] = [event.clientX - area.left, event.clientY - area.top];
      this.tip.style.left = `${Math.max(0, Math.min(x + 14, area.width - this.tip.offsetWidth))}px`;
      this.tip.style.top = `${y + 18}px`;
    }

    // --- moving about ----------------------------------------------------------------------------------

    show(low, high) {
      const width = Math.min(this.last - this.first, Math.max(NARROWEST_NS, high - low));
      const from = Math.max(this.first, Math.min(low, this.last - width));
      this.view = {low: from, high: from + width};
      this.tip.hidden = true;
      Object.assign(this.frame.dataset, {low: this.view.low, high: this.view.high});
      this.paint();
    }

    zoom(factor, at = (this.view.low + this.view.high) / 2) {
      this.show(at - (at - this.view.low) * factor, at + (this.view.high - at) * factor);
    }

    move(share) {
      const by = (this.view.high - this.view.low) * share;
      this.show(this.view.low + by, this.view.high + by);
    }

    goTo(low, high, text) {
      this.mark = {low, high};
      this.says.textContent = text;
      this.show(low - 0.75 * (high - low), high + 0.75 * (high - low));
    }

    goToGap(number) {
      this.gap = number;
      const {from, to, said} = this.gaps[number].dataset;
      this.goTo(Number(from), Number(to), `Gap ${number + 1} of ${this.gaps.length}: ${said}`);
    }

    nextStep() {
      const whole = this.view.high - this.view.low > 0.999 * (this.last - this.first);
      const later = this.steps.findIndex((edge, place) => place < this.steps.length - 1
        && edge > this.view.low + (this.last - this.first) * 1e-6);
      const number = whole ? 0 : Math.max(0, later);
      this.mark = null;
      this.says.textContent = `Step ${number + 1} of ${this.steps.length - 1}`;
      this.show(this.steps[number], this.steps[number + 1]);
    }

    // All events of one name stand out, and the next of the longest is shown.
    async pick(name) {
      try {
        if (name !== this.picked) [this.picked, this.places, this.place] = [name, await this.source.places(name), -1];
      } catch (error) {
        this.says.textContent = `The events could not be found: ${error.message}.`;
        return;
      }
      if (!this.places.length) {
        this.picked = "";
        this.says.textContent = "No event of this name is in the timeline.";
      } else {
        this.place = (this.place + 1) % this.places.length;
        const {lane, start_ns: start, length_ns: length} = this.places[this.place];
        const shown = name.length > 80 ? `${name.slice(0, 79)}…` : name;
        this.goTo(start, start + length, `${this.place + 1} of the ${this.places.length} longest: ${shown}, ${shortTime(length)}, ${lane}`);
      }
      this.frame.querySelector('[data-do="unpick"]').hidden = !this.picked;
      this.paint();
    }

    unpick() {
      this.picked = "";
      this.mark = null;
      this.says.textContent = "";
      this.frame.querySelector('[data-do="unpick"]').hidden = true;
      this.paint();
    }

    do(action) {
      const count = this.gaps.length;
      ({
        in: () => this.zoom(0.5), out: () => this.zoom(2), left: () => this.move(-0.3), right: () => this.move(0.3),
        step: () => this.nextStep(), unpick: () => this.unpick(),
        all: () => { this.unpick(); this.show(this.first, this.last); },
        gap: () => count && this.goToGap((this.gap + 1) % count),
        "gap-before": () => count && this.goToGap((this.gap - 1 + count) % count),
      })[action]();
    }

    listen() {
      const {canvas, frame} = this;
      frame.addEventListener("click", event => {
        const button = event.target.closest("button[data-do]");
        if (button) this.do(button.dataset.do);
      });
      frame.addEventListener("keydown", event => {
        const action = KEYS[event.key];
        if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
        event.preventDefault();
        this.do(action);
      });
      canvas.addEventListener("wheel", event => {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.at(event.clientX - canvas.getBoundingClientRect().left));
      }, {passive: false});
      canvas.addEventListener("dblclick", () => this.do("all"));
      canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
      this.listenToDrags();
    }

    // Drag to zoom; with Shift, or a finger, to move; a click without a drag picks what is there.
    listenToDrags() {
      const {canvas} = this;
      let began = null;
      const x = event => event.clientX - canvas.getBoundingClientRect().left;
      canvas.addEventListener("pointerdown", event => {
        if (event.button !== 0) return;
        canvas.setPointerCapture(event.pointerId);
        began = {x: x(event), moves: event.shiftKey || event.pointerType === "touch", view: {...this.view}, far: false};
      });
      canvas.addEventListener("pointermove", event => {
        if (!began) { this.hover(event); return; }
        const by = x(event) - began.x;
        began.far ||= Math.abs(by) > 4;
        if (!began.far) return;
        if (began.moves) {
          const ns = by / this.placed.inner * (began.view.high - began.view.low);
          this.show(began.view.low - ns, began.view.high - ns);
        } else {
          const [low, high] = [this.at(Math.min(began.x, x(event))), this.at(Math.max(began.x, x(event)))];
          this.drag = {low, high};
          this.paint();
        }
      });
      const end = event => {
        const {drag} = this, far = began?.far, mouse = began && !began.moves;
        [began, this.drag] = [null, null];
        if (event.type === "pointercancel") return;
        if (drag) this.show(drag.low, drag.high);
        else if (!far && mouse) this.click(event);
      };
      canvas.addEventListener("pointerup", end);
      canvas.addEventListener("pointercancel", end);
    }

    click(event) {
      const box = this.canvas.getBoundingClientRect();
      const name = this.under(event.clientX - box.left, event.clientY - box.top)?.cells[0]?.name;
      if (!name) return;
      this.says.textContent = name;
      this.offerRow(name);
    }

    // A button beside the name leads to its row in the tables, where it has one.
    offerRow(name) {
      const row = [...this.frame.closest(".trial, main").querySelectorAll("button.events")]
        .find(button => button.dataset.name === name)?.closest("tr");
      if (!row) return;
      const button = document.createElement("button");
      Object.assign(button, {type: "button", className: "link", textContent: "show in the tables"});
      button.addEventListener("click", () => {
        row.hidden = false;
        for (let around = row.closest("details"); around; around = around.parentElement.closest("details")) around.open = true;
        row.scrollIntoView({block: "center", behavior: "instant"});
        row.querySelector("button.events").focus({preventScroll: true});
      });
      this.says.append(" · ", button);
    }
  }

  // --- the timelines of a page -------------------------------------------------------------------------

  const known = new WeakMap();

  // Resolves once it can be moved about in.
  function timelineOf(frame) {
    if (!known.has(frame)) {
      const timeline = new Timeline(frame);
      known.set(frame, timeline.start().then(() => timeline));
    }
    return known.get(frame);
  }

  const near = new IntersectionObserver(entries => {
    for (const entry of entries) if (entry.isIntersecting) timelineOf(entry.target);
  }, {rootMargin: "300px"});

  const look = () => document.querySelectorAll(".timeline").forEach(frame => near.observe(frame));
  steptune.ready(look);
  document.addEventListener("page-refreshed", look);

  // Buttons anywhere in a profile lead into its timeline, also before that has been drawn.
  document.addEventListener("click", async event => {
    const button = event.target.closest("button.gap, button.events, button.goto-gap");
    const frame = button?.closest(".trial, main").querySelector(".timeline");
    if (!frame) return;
    const timeline = await timelineOf(frame);
    if (!timeline.view) return;
    if (button.matches(".events")) await timeline.pick(button.dataset.name);
    else timeline.goToGap(button.matches(".gap") ? timeline.gaps.indexOf(button) : Number(button.dataset.gap));
    frame.scrollIntoView({block: "center", behavior: "instant"});
    frame.focus({preventScroll: true});
  });
})();
