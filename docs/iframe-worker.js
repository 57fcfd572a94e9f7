// Search of the site without a server: a browser starts no worker from a file, so a frame runs its script.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.ready = this.start(url);
    }

    async start(url) {
      const frame = document.createElement("iframe");
      frame.hidden = true;
      await new Promise((resolve) => {
        frame.onload = resolve;
        document.body.append(frame);
      });
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...urls) => Promise.all(urls.map((each) => this.load(inside, each)));
      await this.load(inside, url);
      return inside;
    }

    load(inside, url) {
      return new Promise((resolve, reject) => {
        const script = inside.document.createElement("script");
        script.src = url;
        script.onload = resolve;
        script.onerror = reject;
        inside.document.body.append(script);
      });
    }

    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }

    terminate() {}
  };
}
