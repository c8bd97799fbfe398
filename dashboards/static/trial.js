// The page of a trial: its log, and its trace in Perfetto.
"use strict";

(() => {
  const PERFETTO = "https://ui.perfetto.dev";
  const PATIENCE_MS = 15000;
  const ASK_MS = 200;

  // --- the log ---------------------------------------------------------------------------------

  async function loadLog(details) {
    const says = details.querySelector("[role=status]");
    const text = details.querySelector("pre");
    try {
      const answer = await fetch(details.dataset.log, {credentials: "same-origin"});
      if (!answer.ok) throw new Error(`the service answered ${answer.status}`);
      text.textContent = await answer.text();
      text.hidden = false;
      says.textContent = text.textContent ? "The end of what its processes printed." : "Its processes printed nothing.";
      text.scrollTop = text.scrollHeight;
    } catch (error) {
      details.loaded = false;
      says.textContent = `The log could not be read: ${error.message}.`;
    }
  }

  document.addEventListener("toggle", event => {
    const details = event.target;
    if (!details.matches("details[data-log]") || !details.open || details.loaded) return;
    details.loaded = true;
    loadLog(details);
  }, {capture: true});

  // --- Perfetto: nothing is asked of it before the click ------------------------------------------

  function whenReady(tab) {
    return new Promise((resolve, reject) => {
      const began = Date.now();
      const hear = event => {
        if (event.source !== tab || event.origin !== PERFETTO || event.data !== "PONG") return;
        stop();
        resolve();
      };
      const timer = setInterval(() => {
        if (tab.closed) { stop(); reject(new Error("its tab was closed")); return; }
        if (Date.now() - began > PATIENCE_MS) { stop(); reject(new Error("it does not answer; is there no network?")); return; }
        tab.postMessage("PING", PERFETTO);
      }, ASK_MS);
      const stop = () => { clearInterval(timer); removeEventListener("message", hear); };
      addEventListener("message", hear);
    });
  }

  async function openInPerfetto(button) {
    const says = button.parentElement.querySelector("[data-perfetto-says]");
    const tab = open(PERFETTO, "_blank");
    if (!tab) { says.textContent = "The browser did not allow a new tab: download the trace and open it there."; return; }
    says.textContent = "Waiting for Perfetto…";
    try {
      const [answer] = await Promise.all([fetch(button.dataset.perfetto, {credentials: "same-origin"}), whenReady(tab)]);
      if (!answer.ok) throw new Error(`the service answered ${answer.status}`);
      const buffer = await answer.arrayBuffer();
      const title = button.dataset.title;
      tab.postMessage({perfetto: {buffer, title, fileName: `${title}.json.gz`, keepApiOpen: false}}, PERFETTO, [buffer]);
      says.textContent = "Perfetto has it.";
    } catch (error) {
      says.textContent = `Perfetto could not be given the trace: ${error.message}. Download it and open it there.`;
    }
  }

  document.addEventListener("click", event => {
    const button = event.target.closest("button[data-perfetto]");
    if (button) openInPerfetto(button);
  });
})();
