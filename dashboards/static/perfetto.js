// Traces in Perfetto. Nothing is asked of it before a click.
"use strict";

(() => {
  const PERFETTO = "https://ui.perfetto.dev";
  const PATIENCE_MS = 15000;
  const ASK_MS = 200;

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
        if (Date.now() - began > PATIENCE_MS) { stop(); reject(new Error("it does not answer; check the network connection")); return; }
        tab.postMessage("PING", PERFETTO);
      }, ASK_MS);
      const stop = () => { clearInterval(timer); removeEventListener("message", hear); };
      addEventListener("message", hear);
    });
  }

  // The trace of a trial, from the service.
  async function kept({perfetto, title}) {
    const answer = await fetch(perfetto, {credentials: "same-origin"});
    if (!answer.ok) throw new Error(`the service answered ${answer.status}`);
    return {buffer: await answer.arrayBuffer(), title, fileName: `${title}.json.gz`};
  }

  // A file of the reader's: a page that is one file holds no trace.
  async function chosen(file) {
    return {buffer: await file.arrayBuffer(), title: file.name, fileName: file.name};
  }

  async function openInPerfetto(element, read) {
    const says = element.parentElement.querySelector("[data-perfetto-says]");
    const tab = open(PERFETTO, "_blank");
    if (!tab) { says.textContent = "The browser did not allow a new tab: download the trace and open it there."; return; }
    says.textContent = "Waiting for Perfetto…";
    try {
      const [{buffer, title, fileName}] = await Promise.all([read(), whenReady(tab)]);
      tab.postMessage({perfetto: {buffer, title, fileName, keepApiOpen: false}}, PERFETTO, [buffer]);
      says.textContent = "The trace is open in Perfetto.";
    } catch (error) {
      says.textContent = `The trace could not be passed to Perfetto: ${error.message}. Download the trace and open it there.`;
    }
  }

  document.addEventListener("click", event => {
    const button = event.target.closest("button[data-perfetto]");
    if (button) openInPerfetto(button, () => kept(button.dataset));
  });
  document.addEventListener("change", event => {
    const input = event.target.closest("input[data-perfetto-file]");
    if (!input?.files.length) return;
    const [file] = input.files;
    openInPerfetto(input.closest("label"), () => chosen(file));
    input.value = "";
  });
})();
