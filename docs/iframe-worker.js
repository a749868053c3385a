// Search works from the disk too. A browser starts no Worker from a file, so a hidden frame takes its place.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.documentElement.append(this.frame);
      this.inner = this.frame.contentWindow;
      this.inner.postMessage = (data) => setTimeout(() => this.onmessage && this.onmessage({ data }));
      this.ready = new Promise((resolve, reject) => {
        const script = this.inner.document.createElement("script");
        script.src = url;
        script.onload = resolve;
        script.onerror = (event) => { if (this.onerror) this.onerror(event); reject(event); };
        this.inner.document.head.append(script);
      });
    }

    postMessage(data) {
      this.ready.then(() => this.inner.onmessage({ data }), () => {});
    }

    terminate() {
      this.frame.remove();
    }
  };
}
