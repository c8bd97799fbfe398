// The form for a new study: an uploaded file becomes a workload first, then the study is asked for.
"use strict";

(() => {
  const FIELDS = {"/workload": "zoo", "/workload_id": "file", "/file": "file", "/constraints/memory_limit_bytes": "memory_gib"};
  const form = document.getElementById("submit");
  const key = crypto.randomUUID ? crypto.randomUUID() : String(Math.random()).slice(2);
  let attempt = 0;

  const kind = () => form.elements.kind.value;

  function showKind() {
    for (const part of form.querySelectorAll("[data-kind]")) part.hidden = part.dataset.kind !== kind();
  }

  function body(workload) {
    const value = name => form.elements[name].value.trim();
    const found = {...workload, title: value("title"), budget_s: Number(value("budget_s"))};
    found.allow = [...form.querySelectorAll("[name=allow]:checked")].map(box => box.value);
    found.skip = [...form.elements.skip.selectedOptions].map(option => option.value);
    found.num_ranks = Number(value("num_ranks") || 1);
    found.quiet_machine = form.elements.quiet_machine.checked;
    found.priority = Number(value("priority") || 0);
    if (value("device")) found.device = value("device");
    if (value("hardware")) found.hardware = value("hardware");
    if (value("max_trials")) found.max_trials = Number(value("max_trials"));
    if (value("memory_gib")) found.constraints = {memory_limit_bytes: Math.round(Number(value("memory_gib")) * 2 ** 30)};
    return found;
  }

  class Refused extends Error {}

  async function answered(promise) {
    const answer = await promise;
    const content = await answer.json();
    if (answer.ok) return content;
    const refusal = new Refused(content.detail);
    refusal.errors = content.errors || [];
    throw refusal;
  }

  async function workload() {
    const value = name => form.elements[name].value.trim();
    if (kind() === "module") return {workload: value("module")};
    if (kind() === "zoo") return {workload: `zoo:${value("zoo")}${value("arguments") ? `?${value("arguments")}` : ""}`};
    const file = form.elements.file.files[0];
    if (!file) throw new Refused("Choose a file to upload.");
    say("uploading…");
    const content = new FormData();
    content.append("entry", value("entry"));
    content.append("file", file);
    const made = await answered(steptune.call("POST", "/api/v1/workloads", content));
    return {workload_id: made.workload_id};
  }

  function say(text) {
    document.getElementById("progress").textContent = text;
  }

  function complain(text, errors) {
    const problem = document.getElementById("problem");
    problem.textContent = text;
    problem.hidden = false;
    for (const field of form.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
    const pointer = errors && errors.length ? errors[0].pointer : "";
    const name = FIELDS[pointer] || pointer.split("/")[1];
    const field = name && form.elements[name];
    if (field && field.focus) {
      field.setAttribute("aria-invalid", "true");
      field.setAttribute("aria-describedby", "problem");
      field.focus();
    }
  }

  form.addEventListener("change", showKind);
  form.addEventListener("submit", async event => {
    event.preventDefault();
    const button = form.querySelector("button[type=submit]");
    button.disabled = true;
    document.getElementById("problem").hidden = true;
    try {
      const asked = body(await workload());
      say("submitting…");
      const study = await answered(steptune.call("POST", "/api/v1/studies", asked, {"Idempotency-Key": `${key}-${attempt}`}));
      location.assign(`${steptune.base}/studies/${study.study_id}`);
    } catch (error) {
      attempt += 1;
      say("");
      complain(error instanceof Refused ? error.message : `The service cannot be reached: ${error.message}`, error.errors);
      button.disabled = false;
    }
  });
  showKind();
})();
