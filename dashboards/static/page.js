// Draws the figures of a page: each from the JSON beside it, when it comes near the window.
// A figure that was drawn says so with the event `figure-drawn`, for scripts that listen to clicks in it.
"use strict";

const steptune = (() => {
  const PAPER_WIDTH = 690;
  const OPTIONS = {displayModeBar: false, responsive: true};
  const body = document.body;
  const base = body.dataset.base || "";

  function plotOf(figure) {
    return figure.querySelector(".plot");
  }

  function draw(figure) {
    const source = figure.querySelector(".plot-data");
    if (figure.drawn === source.textContent || typeof Plotly === "undefined") return;
    const info = JSON.parse(source.textContent);
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
    for (const figure of figures()) {
      draw(figure);
      Plotly.relayout(plotOf(figure), {width: PAPER_WIDTH, autosize: false});
    }
  });
  addEventListener("afterprint", () => {
    for (const figure of figures()) Plotly.relayout(plotOf(figure), {width: null, autosize: true});
  });

  function ready(start) {
    if (document.readyState === "loading") addEventListener("DOMContentLoaded", start);
    else start();
  }
  ready(() => {
    watch(document);
    document.documentElement.dataset.ready = "yes";
  });

  // A request of the interface: with what proves that it comes from this page.
  function call(method, path, content, more = {}) {
    const headers = {"Accept": "application/json", ...more};
    if (body.dataset.csrf) headers["X-CSRF-Token"] = body.dataset.csrf;
    if (content !== undefined && !(content instanceof FormData)) {
      headers["Content-Type"] = "application/json";
      content = JSON.stringify(content);
    }
    return fetch(base + path, {method, headers, body: content, credentials: "same-origin"});
  }

  return {base, call, draw, watch, ready, figures, plotOf};
})();
