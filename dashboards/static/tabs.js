// Shows the sections of a study one at a time, as tabs. Without scripts they follow one another.
"use strict";

(() => {
  const list = document.querySelector("nav.tabs");
  const panels = [...document.querySelectorAll(".panel")];
  if (!list || !panels.length) return;
  const tabs = [...list.querySelectorAll("a")];
  const panelOf = tab => panels.find(panel => panel.dataset.panel === tab.hash.slice(1));

  list.setAttribute("role", "tablist");
  for (const tab of tabs) {
    const panel = panelOf(tab);
    Object.assign(tab, {id: `tab-${panel.dataset.panel}`, role: "tab"});
    Object.assign(panel, {id: `panel-${panel.dataset.panel}`, role: "tabpanel"});
    tab.setAttribute("aria-controls", panel.id);
    panel.setAttribute("aria-labelledby", tab.id);
  }

  function show(panel) {
    for (const other of panels) other.hidden = other !== panel;
    for (const tab of tabs) {
      const chosen = panelOf(tab) === panel;
      tab.setAttribute("aria-selected", chosen);
      tab.tabIndex = chosen ? 0 : -1;
    }
  }

  // An address may name a tab, or anything in one.
  function follow() {
    let target = null;
    try { target = document.getElementById(decodeURIComponent(location.hash.slice(1))); } catch { /* names nothing */ }
    const panel = target?.closest(".panel");
    if (!panel) { if (panels.every(other => !other.hidden)) show(panels[0]); return; }
    show(panel);
    for (let details = target.closest("details"); details; details = details.parentElement.closest("details")) details.open = true;
    if (!tabs.some(tab => tab.hash === location.hash)) target.scrollIntoView();
  }

  function choose(tab) {
    history.replaceState(null, "", tab.hash);
    show(panelOf(tab));
  }

  list.addEventListener("click", event => {
    const tab = event.target.closest("a");
    if (!tab || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    choose(tab);
  });
  list.addEventListener("keydown", event => {
    const steps = {ArrowRight: 1, ArrowLeft: -1, Home: -tabs.length, End: tabs.length};
    if (event.key === " ") { event.preventDefault(); choose(document.activeElement); }
    if (!(event.key in steps)) return;
    event.preventDefault();
    const here = tabs.indexOf(document.activeElement), step = steps[event.key];
    const next = Math.abs(step) > 1 ? (step < 0 ? 0 : tabs.length - 1) : (here + step + tabs.length) % tabs.length;
    tabs[next].focus();
    choose(tabs[next]);
  });
  addEventListener("hashchange", follow);

  let chosen = null;
  addEventListener("beforeprint", () => {
    chosen = panels.find(panel => !panel.hidden);
    for (const panel of panels) panel.hidden = false;
  });
  addEventListener("afterprint", () => { if (chosen) show(chosen); });

  follow();
})();
