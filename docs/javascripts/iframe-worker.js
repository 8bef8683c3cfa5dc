// The search of a site that is opened from a folder. Browsers do not start a worker of a file:// URL, so
// its script runs in a hidden frame of the page. The theme's script looks for the name IFrameWorker.
"use strict";

class IFrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.append(this.frame);
    const scope = this.frame.contentWindow;
    scope.postMessage = (data) => {
      const message = new MessageEvent("message", { data });
      this.dispatchEvent(message);
      this.onmessage?.(message);
    };
    scope.importScripts = async (...urls) => {
      for (const each of urls) await this.load(each);
    };
    this.loaded = this.load(url);
  }

  load(url) {
    const page = this.frame.contentDocument;
    return new Promise((resolve, reject) => {
      const script = page.createElement("script");
      script.src = url;
      script.onload = resolve;
      script.onerror = () => reject(new Error(`could not load ${url}`));
      page.body.append(script);
    });
  }

  async postMessage(data) {
    await this.loaded;
    const scope = this.frame.contentWindow;
    scope.dispatchEvent(new scope.MessageEvent("message", { data: structuredClone(data) }));
  }

  terminate() {
    this.frame.remove();
  }
}

if (location.protocol === "file:") {
  window.IFrameWorker = IFrameWorker;
  window.Worker = IFrameWorker;
}
