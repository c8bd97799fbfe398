// The list of studies: two are chosen to be compared, and those that have ended to be deleted.
"use strict";

(() => {
  const chosen = new Set();
  const boxes = () => [...document.querySelectorAll("#studies input[name=study]")];
  const say = text => { document.getElementById("chosen-note").textContent = text; };
  const noun = number => `${number} ${number === 1 ? "study" : "studies"}`;

  function show() {
    for (const box of boxes()) box.checked = chosen.has(box.value);
    const deletable = boxes().filter(box => box.checked && box.dataset.deletable !== undefined).length;
    const compare = document.getElementById("compare-chosen"), remove = document.getElementById("delete-chosen");
    compare.disabled = chosen.size !== 2;
    if (remove) remove.disabled = deletable === 0 || deletable !== chosen.size;
    say(chosen.size ? `${noun(chosen.size)} chosen` : "");
  }

  document.addEventListener("change", event => {
    const box = event.target.closest("#studies input[name=study]");
    if (!box) return;
    if (box.checked) chosen.add(box.value);
    else chosen.delete(box.value);
    show();
  });

  async function remove() {
    if (!confirm(`Delete ${noun(chosen.size)} and all measurements in them? This cannot be undone.`)) return;
    for (const study of [...chosen]) {
      try {
        const answer = await steptune.call("DELETE", `/api/v1/studies/${study}`);
        if (!answer.ok) { say((await answer.json()).detail); return; }
      } catch (error) {
        say(`the service cannot be reached: ${error.message}`);
        return;
      }
      chosen.delete(study);
    }
    location.reload();
  }

  document.addEventListener("click", event => {
    if (event.target.id === "delete-chosen") remove();
    if (event.target.id !== "compare-chosen") return;
    const inOrder = boxes().filter(box => chosen.has(box.value)).map(box => box.value).reverse();  // the older one is A
    location.assign(`${steptune.base}/compare?a=${inOrder[0]}&b=${inOrder[1]}`);
  });
  document.addEventListener("section-replaced", () => {
    const there = new Set(boxes().map(box => box.value));
    for (const study of chosen) if (!there.has(study)) chosen.delete(study);
    show();
  });
  steptune.ready(() => { if (document.getElementById("compare-chosen")) show(); });
})();
