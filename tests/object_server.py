"""A local server of objects over HTTP, HTTPS and what of S3 is asked by those who only read."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import ssl
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class Objects(dict):
    """What is served, by path such as ``bucket/x.npy``; and how the server fails.

    Parameters
    ----------
    contents : dict of str to bytes
    tags : bool
        Answers carry an ETag, of the content.
    date : str or None
        When all objects changed last, as answers say it.
    ranges : bool
        Parts of objects are served.
    """

    def __init__(self, contents, *, tags=True, ranges=True, date="Wed, 01 Jan 2025 00:00:00 GMT"):
        self.tags, self.ranges, self.date = tags, ranges, date
        self.restore(contents)

    def restore(self, contents):
        """Serve these, without failing."""
        self.clear()
        self.update(contents)
        #: Paths that nobody may read.
        self.refused = set()
        #: Paths of which only half is sent, and then no more.
        self.cut = set()
        #: Called with the path before the content of an object is sent.
        self.before = lambda path: None


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        objects, asked = self.server.objects, urlsplit(self.path)
        path, query = unquote(asked.path).strip("/"), parse_qs(asked.query)
        if path in objects.refused or path.partition("/")[0] in objects.refused:
            self.answer(403, _error("AccessDenied"))
        elif "list-type" in query:
            self.answer(200, _listing(objects, path, query))
        elif path not in objects:
            self.answer(404, _error("NoSuchKey"))
        else:
            if self.command == "GET":
                objects.before(path)
            self.give(path, objects[path], objects)

    def give(self, path, content, objects):
        tag = f'"{hashlib.md5(content).hexdigest()}"'
        headers = {"Accept-Ranges": "bytes" if objects.ranges else "none"}
        if objects.date is not None:
            headers["Last-Modified"] = objects.date
        if objects.tags:
            headers["ETag"] = tag
            if self.headers.get("If-Match", tag) != tag:
                self.answer(412, _error("PreconditionFailed"))
                return
        status, asked = 200, self.headers.get("Range")
        if asked and objects.ranges:
            first, last = asked.removeprefix("bytes=").split("-")
            start = int(first) if first else max(0, len(content) - int(last))
            stop = min(int(last) + 1, len(content)) if first and last else len(content)
            if start >= len(content):
                self.answer(416, _error("InvalidRange"))
                return
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            status, content = 206, content[start:stop]
        self.answer(status, content, headers, cut=path in objects.cut)

    def answer(self, status, content, headers=(), cut=False):
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        self.close_connection = self.close_connection or cut


def _error(code):
    return f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


def _listing(objects, bucket, query):
    """The answer to S3's ListObjectsV2."""
    prefix, ends = (query.get(name, [""])[0] for name in ("prefix", "delimiter"))
    inside, folders = [], set()
    for path, content in sorted(objects.items()):
        key = path.removeprefix(f"{bucket}/")
        if key == path or not key.startswith(prefix):
            continue
        head, found, _ = key[len(prefix) :].partition(ends) if ends else (key, "", "")
        if found:
            folders.add(prefix + head + ends)
        else:
            tag = hashlib.md5(content).hexdigest()
            inside.append(
                f"<Contents><Key>{escape(key)}</Key><Size>{len(content)}</Size>"
                f"<ETag>&quot;{tag}&quot;</ETag>"
                "<LastModified>2025-01-01T00:00:00.000Z</LastModified></Contents>"
            )
    common = "".join(
        f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
        for folder in sorted(folders)
    )
    return (
        '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{bucket}</Name><IsTruncated>false</IsTruncated>"
        f"<KeyCount>{len(inside) + len(folders)}</KeyCount>{''.join(inside)}{common}"
        "</ListBucketResult>"
    ).encode()


@contextmanager
def served(objects, certificate=None):
    """Serve them on a port of this host; give the address without a path."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.daemon_threads = True
        server.objects = objects
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            scheme = "http" if certificate is None else "https"
            yield f"{scheme}://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def make_certificate(path):
    """A certificate of this host by itself, with its key, in one file."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "multimm test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    path.write_bytes(
        made.public_bytes(encoding)
        + key.private_bytes(encoding, form, serialization.NoEncryption())
    )
    return path
