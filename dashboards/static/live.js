// Keeps a page current: on events of the service it asks for the page again and puts in what has changed.
"use strict";

(() => {
  const PAUSE_MS = 700;
  let timer = 0;
  let asking = false;
  let again = false;

  function focusable(root) {
    return [...root.querySelectorAll("a[href], button, input, select, summary, [tabindex]")];
  }

  // What a reader has done to a section stays: what was opened, where the focus is, figures that are drawn.
  function replace(old, fresh) {
    const open = new Set([...old.querySelectorAll("details[open]")].map(d => d.id || d.textContent.slice(0, 80)));
    const place = focusable(old).indexOf(document.activeElement);
    const values = new Map([...old.querySelectorAll("input[id], textarea[id]")].map(input => [input.id, input.value]));
    for (const details of fresh.querySelectorAll("details")) {
      if (open.has(details.id || details.textContent.slice(0, 80))) details.open = true;
    }
    for (const [id, value] of values) {
      const input = fresh.querySelector(`#${CSS.escape(id)}`);
      if (input) input.value = value;
    }
    for (const figure of old.querySelectorAll(".figure")) {
      const next = fresh.querySelector(`.figure[data-figure="${CSS.escape(figure.dataset.figure)}"]`);
      if (!next || figure.drawn === undefined) continue;
      steptune.plotOf(next).replaceWith(steptune.plotOf(figure));
      next.drawn = figure.drawn;
    }
    old.replaceWith(fresh);
    fresh.dispatchEvent(new CustomEvent("section-replaced", {bubbles: true}));
    if (place >= 0) focusable(fresh)[place]?.focus({preventScroll: true});
    steptune.watch(fresh);
    for (const figure of fresh.querySelectorAll(".figure")) if (figure.drawn !== undefined) steptune.draw(figure);
  }

  async function refresh() {
    if (asking) { again = true; return; }
    asking = true;
    try {
      const answer = await fetch(location.href, {credentials: "same-origin", headers: {"Accept": "text/html"}});
      if (answer.redirected) { location.reload(); return; }  // the session is over
      if (!answer.ok) return;
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const main = document.getElementById("main");
      let before = null;
      for (const fresh of page.querySelectorAll("[data-live]")) {
        const old = document.getElementById(fresh.id);
        if (old === null) {
          const copy = document.importNode(fresh, true);
          copy.served = fresh.innerHTML;
          if (before) before.after(copy); else main.append(copy);
          steptune.watch(copy);
          before = copy;
        } else {
          before = old;
          if (old.matches(":active")) {
            again = true;  // a button that goes between press and release is not clicked
          } else if (old.served !== fresh.innerHTML) {
            const copy = document.importNode(fresh, true);
            copy.served = fresh.innerHTML;
            replace(old, copy);
            before = copy;
          }
        }
      }
      document.title = page.title;
      document.dispatchEvent(new CustomEvent("page-refreshed"));
    } catch (error) {
      console.warn("the page could not be brought up to date", error);
    } finally {
      asking = false;
      if (again) { again = false; soon(); }
    }
  }

  // Events that come faster than the pause do not put it off.
  function soon() {
    if (timer) return;
    timer = setTimeout(() => { timer = 0; refresh(); }, PAUSE_MS);
  }

  function follow() {
    const root = document.querySelector("[data-events]");
    if (!root) return;
    const [path, query] = root.dataset.events.split("?after=");
    const kinds = root.dataset.kinds.split(" ");
    let last = query;
    let source = null;
    const open = () => {
      source = new EventSource(`${steptune.base}${path}?after=${last}`);
      for (const kind of kinds) source.addEventListener(kind, event => { last = event.lastEventId; soon(); });
      source.addEventListener("progress", event => {
        last = event.lastEventId;
        document.dispatchEvent(new CustomEvent("progress", {detail: JSON.parse(event.data).data}));
      });
      source.addEventListener("open", () => { document.documentElement.dataset.live = "yes"; });
    };
    open();
    // A browser allows few connections to one host: pages that nobody looks at give theirs back.
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) source.close();
      else if (source.readyState === EventSource.CLOSED) { open(); soon(); }
    });
  }

  steptune.refresh = soon;
  steptune.ready(follow);
})();
