"""Object stores for tests: one in memory, and an S3 server with a proxy before it that delays,
refuses, cuts and counts.
"""

import contextlib
import datetime
import http.client
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

BUCKET = "bucket"
OWNER = "AWS4-HMAC-SHA256 Credential=secret/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"


def memory_store(monkeypatch, folder):
    """Returns an object store in memory, which stands for all stores from now on.

    Its `seen` are the requests so far, as ("GET", key); a prefix is the key of "LIST". `before` is
    called with them before a request, and may wait, or raise what the request then raises.
    `folder` holds the local copies of indexes: other processes have stores of the same name.
    """
    from obstore.store import MemoryStore  # Python 3.10 has none

    from dali_tf_input.storage import objects

    async def answer(method, key):
        pass

    class Store(MemoryStore):
        def __init__(self):
            super().__init__()
            self.seen, self.before = [], answer

        async def _ask(self, method, key):
            self.seen.append((method, key))
            await self.before(method, key)

        async def get_async(self, path, *, options=None):
            await self._ask("GET", path)
            return await super().get_async(path, options=options)

        async def put_async(self, path, *arguments, **options):
            await self._ask("PUT", path)
            return await super().put_async(path, *arguments, **options)

        async def list_with_delimiter_async(self, prefix=None):
            await self._ask("LIST", prefix)
            return await super().list_with_delimiter_async(prefix)

        def count(self, method, ending=""):
            """Returns how many requests there were for keys that end so."""
            return sum(one == method and (key or "").endswith(ending) for one, key in self.seen)

    store = Store()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(objects, "_store", lambda *_: store)
    return store


def set_credentials(monkeypatch, endpoint):
    """Has S3's clients ask there."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")


def free_port():
    """Returns a port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        return held.getsockname()[1]


@contextlib.contextmanager
def run_server():
    """Gives the port of moto's S3 server, a process of its own, with one bucket."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": ""}, **silent)
    try:
        while True:
            with contextlib.suppress(OSError):
                ask(port, "PUT", f"/{BUCKET}")
                break
            assert process.poll() is None
            time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()


def ask(port, method, path, body=None, headers=None):
    """Returns the answer to a request, and its body."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request(method, path, body, headers or {"Authorization": OWNER})
    answer = connection.getresponse()
    return answer, answer.read()


@contextlib.contextmanager
def run_tls_server(certificate):
    """Gives the port of an https server that has nothing; writes its own certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now, names = datetime.datetime.now(datetime.timezone.utc), x509.SubjectAlternativeName
    built = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    built = built.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    built = built.add_extension(names([x509.DNSName("localhost")]), critical=False)
    pem, formats = serialization.Encoding.PEM, serialization.PrivateFormat
    text = key.private_bytes(pem, formats.PKCS8, serialization.NoEncryption())
    certificate.write_bytes(built.sign(key, hashes.SHA256()).public_bytes(pem) + text)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server.server_port
        server.shutdown()


def generation(answer):
    """Returns the number that GCS has for a version, here made of the etag; 0 for no object."""
    return str(int((answer.getheader("ETag") or "0").strip('"')[:8], 16))


class Proxy:
    """Passes requests on, for GCS too, whose XML is that of S3 but for the numbers of versions.

    Attributes:
      fault: called with method and path before a request; returns what happens to it: None, a
        status and the store's words such as "503" or "403 AccessDenied", "cut" (the connection ends
        within the body) or "short" (the body).
      seen: the requests so far, as "GET /bucket/name".
      edit: makes of an answer's body what is sent.
    """

    def __init__(self, port):
        proxy = self
        self.fault, self.seen, self.edit = (lambda method, path: None), [], bytes
        self.weak = ""  # what is put before an etag

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self):
                proxy.seen.append(f"{self.command} {self.path}")
                fault = proxy.fault(self.command, self.path)
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if fault and fault[:3].isdigit():
                    words = b"" if self.command == "HEAD" else f"<Error>{fault[4:]}".encode()
                    self.send_response(int(fault[:3]))
                    self.send_header("Content-Length", str(len(words)))
                    self.end_headers()
                    self.wfile.write(words)
                    return
                headers = {"Authorization": OWNER, **self.headers}
                wanted = headers.pop("x-goog-if-generation-match", None)
                if wanted and wanted != generation(ask(port, "HEAD", self.path)[0]):
                    self.send_error(412)
                    return
                answer, data = ask(port, self.command, self.path, body, headers)
                self.send_response(answer.status)
                self.send_header("x-goog-generation", generation(answer))
                for name, value in answer.getheaders():
                    value = f"{proxy.weak}{value}" if name == "ETag" else value
                    if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                data = proxy.edit(data)
                kept = data[: len(data) // 2] if fault in ("short", "cut") else data
                size = len(kept if fault == "short" else data)
                size = answer.getheader("Content-Length") if self.command == "HEAD" else size
                self.send_header("Content-Length", size)
                self.end_headers()
                self.wfile.write(kept)
                if fault == "cut":
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = answer  # noqa: N815

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()
