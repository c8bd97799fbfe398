// The page of a trial: its log.
"use strict";

(() => {
  async function loadLog(details) {
    const says = details.querySelector("[role=status]");
    const text = details.querySelector("pre");
    try {
      const answer = await fetch(details.dataset.log, {credentials: "same-origin"});
      if (!answer.ok) throw new Error(`the service answered ${answer.status}`);
      text.textContent = await answer.text();
      text.hidden = false;
      says.textContent = text.textContent ? "The end of the output of the trial's processes." : "The trial's processes printed nothing.";
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
})();
