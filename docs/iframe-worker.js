// Search in pages that are opened from a disk, where browsers start no workers: the theme's search
// worker runs in a hidden frame instead. The plugin `offline` looks for a script of this name.
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    this.ready = new Promise((resolve) => {
      frame.onload = () => {
        const scope = frame.contentWindow;
        scope.postMessage = (data) =>
          this.dispatchEvent(new MessageEvent("message", { data }));
        const script = scope.document.createElement("script");
        script.src = new URL(url, document.baseURI);
        script.onload = () => resolve(scope);
        scope.document.body.append(script);
      };
    });
    document.body.append(frame);
  }

  async postMessage(data) {
    const scope = await this.ready;
    scope.dispatchEvent(new MessageEvent("message", { data }));
  }
}

if (location.protocol === "file:") {
  window.Worker = FrameWorker;
}
