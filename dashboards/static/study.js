// The page of a study: what it costs at the reader's price, what is going on, and pausing, resuming, cancelling, deleting it.
"use strict";

(() => {
  const KEY = "steptune.price";
  const number = (value, digits) => value.toLocaleString("en-GB", {maximumSignificantDigits: digits});

  function duration(seconds) {
    const whole = Math.round(seconds), minutes = Math.floor(whole / 60);
    if (whole < 60) return `${whole} s`;
    if (minutes < 60) return whole % 60 ? `${minutes} min ${whole % 60} s` : `${minutes} min`;
    return minutes % 60 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${Math.floor(minutes / 60)} h`;
  }

  function stored() {
    try { return localStorage.getItem(KEY) || ""; } catch { return ""; }
  }

  function store(value) {
    try { localStorage.setItem(KEY, value); } catch { /* a page from a file may not keep anything */ }
  }

  function showCosts() {
    const input = document.getElementById("price");
    if (!input) return;
    const {before, after, tuning} = input.closest(".worth").dataset;
    const note = document.getElementById("price-note");
    if (note.dataset.empty === undefined) note.dataset.empty = note.textContent;
    const price = Number(input.value);
    if (!(price > 0)) { note.textContent = note.dataset.empty; return; }
    const search = `the search cost ${number(price * tuning, 3)}`;
    note.textContent = before
      ? `an epoch costs ${number(price * after, 3)}, today ${number(price * before, 3)}; ${search}`
      : search;
  }

  function begin() {
    const input = document.getElementById("price");
    if (input && !input.value) input.value = stored();
    showCosts();
  }

  document.addEventListener("input", event => {
    if (event.target.id !== "price") return;
    store(event.target.value);
    showCosts();
  });
  document.addEventListener("section-replaced", begin);

  document.addEventListener("click", async event => {
    const button = event.target.closest("[data-action]");
    if (!button) return;
    if (button.dataset.ask && !confirm(button.dataset.ask)) return;
    const controls = document.getElementById("controls");
    const say = text => { document.getElementById("activity").textContent = text; };
    controls.querySelectorAll("button").forEach(other => { other.disabled = true; });
    try {
      const study = `/api/v1/studies/${controls.dataset.study}`;
      const deletes = button.dataset.action === "delete";
      const answer = deletes
        ? await steptune.call("DELETE", study)
        : await steptune.call("POST", `${study}/${button.dataset.action}`);
      if (!answer.ok) say((await answer.json()).detail);
      else if (deletes) location.assign(`${steptune.base}/`);
      else { say("requested; a running study stops soon"); steptune.refresh(); }
    } catch (error) {
      say(`the service cannot be reached: ${error.message}`);
    } finally {
      document.querySelectorAll("#controls button").forEach(other => { other.disabled = false; });
    }
  });

  document.addEventListener("submit", async event => {
    const form = event.target.closest("#about-form");
    if (!form) return;
    event.preventDefault();
    const tags = form.querySelector("#tags").value.split(/[\s,]+/).filter(Boolean);
    const say = text => { document.getElementById("about-note").textContent = text; };
    try {
      const content = {tags, notes: form.querySelector("#notes").value};
      const answer = await steptune.call("PATCH", `/api/v1/studies/${form.dataset.study}`, content);
      say(answer.ok ? "saved" : (await answer.json()).detail);
    } catch (error) {
      say(`the service cannot be reached: ${error.message}`);
    }
  });

  document.addEventListener("progress", event => {
    const {stage, current, activity, budget_s, elapsed_s, spent_before_s} = event.detail;
    const left = document.getElementById("time-left");
    if (left && budget_s) left.textContent = duration(Math.max(0, budget_s - elapsed_s - (spent_before_s ?? 0)));
    const place = document.getElementById("activity");
    if (place) place.textContent = [stage, current, activity].filter(Boolean).join(" · ");
  });

  steptune.ready(begin);
})();
