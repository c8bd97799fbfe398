// Draws the figures of a page: each from the JSON beside it, when it comes near the window. plotly.js takes a browser
// a second to start: the first figure that is near asks for it, or a reader who has had time to look at the rest.
// A figure that was drawn says so with the event `figure-drawn`, for scripts that listen to clicks in it.
"use strict";

const steptune = (() => {
  const PAPER_WIDTH = 690;
  const OPTIONS = {displayModeBar: false, responsive: true};
  const SETTLED_MS = 3000;
  const body = document.body;
  const base = body.dataset.base || "";
  const prepare = {};  // by name of a figure: what completes its data before it is drawn

  function plotOf(figure) {
    return figure.querySelector(".plot");
  }

  let asked = null;

  // Resolves once plotly.js has run: at once where the page holds it, as a report does.
  function plotly() {
    asked ??= new Promise((resolve, reject) => {
      const script = document.createElement("script");
      const kept = document.getElementById("plotly-source");
      if (kept) script.textContent = kept.textContent;
      else Object.assign(script, {src: body.dataset.plotly, onload: resolve, onerror: reject});
      document.head.append(script);
      if (kept) resolve();
    });
    return asked;
  }

  function draw(figure) {
    if (typeof Plotly === "undefined") plotly().then(() => draw(figure));
    else plot(figure);
  }

  function plot(figure) {
    const source = figure.querySelector(".plot-data");
    if (figure.drawn === source.textContent) return;
    const info = JSON.parse(source.textContent);
    prepare[figure.dataset.figure]?.(info);
    const first = figure.drawn === undefined;
    figure.drawn = source.textContent;
    const options = info.config ? {...OPTIONS, ...info.config} : OPTIONS;
    Plotly.react(plotOf(figure), info.data, info.layout, options).then(() => {
      if (first) figure.dispatchEvent(new CustomEvent("figure-drawn", {bubbles: true, detail: plotOf(figure)}));
    });
  }

  function reserve(figure) {
    const height = JSON.parse(figure.querySelector(".plot-data").textContent).layout.height;
    if (height) plotOf(figure).style.minHeight = `${height}px`;
  }

  const near = new IntersectionObserver(entries => {
    for (const entry of entries) if (entry.isIntersecting) draw(entry.target);
  }, {rootMargin: "300px"});

  // What scrolls by itself has to be reached by keyboard, and nothing else should stop it.
  const scrolling = new ResizeObserver(entries => {
    for (const {target} of entries) {
      const more = target.scrollWidth > target.clientWidth || target.scrollHeight > target.clientHeight;
      if (!more) { target.removeAttribute("tabindex"); continue; }
      target.tabIndex = 0;
      target.setAttribute("role", "group");
      if (!target.hasAttribute("aria-label")) target.setAttribute("aria-label", nameOf(target));
    }
  });

  function nameOf(element) {
    const caption = element.querySelector("caption");
    const heading = element.closest("section, details")?.querySelector("h2, h3, summary");
    return (caption || heading || {textContent: "Table"}).textContent.trim();
  }

  function watch(root) {
    for (const element of root.querySelectorAll(".scroll, pre")) scrolling.observe(element);
    for (const figure of root.querySelectorAll(".figure")) {
      reserve(figure);
      near.observe(figure);
    }
  }

  function figures() {
    return document.querySelectorAll(".figure");
  }

  addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach(element => { element.open = true; });
    if (figures().length) plotly();
    if (typeof Plotly === "undefined") return;  // paper does not wait for what is still on its way
    for (const figure of figures()) {
      plot(figure);
      Plotly.relayout(plotOf(figure), {width: PAPER_WIDTH, autosize: false});
    }
  });
  addEventListener("afterprint", () => {
    if (typeof Plotly === "undefined") return;
    for (const figure of figures()) Plotly.relayout(plotOf(figure), {width: null, autosize: true});
  });

  function ready(start) {
    if (document.readyState === "loading") addEventListener("DOMContentLoaded", start);
    else start();
  }
  ready(() => {
    for (const section of document.querySelectorAll("[data-live]")) section.served = section.innerHTML;
    watch(document);
    document.documentElement.dataset.ready = "yes";
    if (figures().length) setTimeout(() => requestIdleCallback(plotly), SETTLED_MS);
  });

  // A request of the interface: with what proves that it comes from this page.
  function call(method, path, content, more = {}) {
    const headers = {"Accept": "application/json", ...more};
    const csrf = document.querySelector("header.site .user")?.dataset.csrf;
    if (csrf) headers["X-CSRF-Token"] = csrf;
    if (content !== undefined && !(content instanceof FormData)) {
      headers["Content-Type"] = "application/json";
      content = JSON.stringify(content);
    }
    return fetch(base + path, {method, headers, body: content, credentials: "same-origin"});
  }

  return {base, call, draw, prepare, watch, ready, figures, plotOf};
})();
