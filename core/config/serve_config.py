"""The section `serve` of the configuration: how clients reach the ingress, and what it allows them."""

from typing import Literal

from pydantic import Field, SecretStr

from core.config.config_section import Section


class ServeConfig(Section):
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 opens it to the network."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0: one that is free."""
    num_ports: int = Field(default=1, ge=1, le=64)
    """1: the ingresses of one host share `port`. More: each takes the first free one of so many from `port` on, so that a load
    balancer sees every one by itself."""
    api_keys: tuple[SecretStr, ...] = ()
    """Clients must present one of these, or one of a tenant's; no key anywhere: none is asked for. `KEY SCOPE,SCOPE` says what a
    key is for: `inference`, `metrics`, `operator`; without scopes: all."""
    api_keys_file: str = ""
    """More of them, one a line, in a file that the ingress can read; `#` begins a comment line."""
    schedulers: int = Field(default=1, ge=1, le=16)
    """Global schedulers that place requests at once, each a part of them. When one is lost the others go on without it. Next to a
    single one there is a spare: a second process that knows the same and places requests once the first is lost."""
    allowed_origins: tuple[str, ...] = ()
    """Origins, such as https://chat.example.com, whose pages may ask from a browser (CORS); `*`: all. Empty: none."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that a request may take before it is ended."""
    resume_s: float = Field(default=30.0, ge=0)
    """How long a client may be away and still have the rest of its answer, from any ingress. So long an instance goes on after
    the loss of an ingress, and keeps what it has generated. 0: an answer ends with its connection, and its events have no ids."""
    drain_notice_s: float = Field(default=3.0, ge=0)
    """How long an ingress that will stop still takes requests while /ready says 503: load balancers turn away meanwhile."""
    drain_timeout_s: float = Field(default=30.0, gt=0)
    """How long running requests may go on after that."""
    unknown_fields: Literal["reject", "warn", "ignore"] = "warn"
    """What becomes of a request with a field that Baton does not know. `warn`: the field is left out, and the answer's header
    x-baton-warning names it. `ignore`: it is left out. `reject`: 400. A field that is known and not supported is refused."""
    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    """A longer body is refused with 413."""
    store: str = ""
    """Database for responses, conversations, files, batches and the list of adapters, which outlives every process:
    `sqlite:////folder/store.db` for one host, `postgresql://host/database` for several. No password: see `store_file`. Empty:
    each ingress keeps responses and conversations in its memory, and there are no files and batches."""
    store_file: str = ""
    """File with such a URL, a password included, in place of `store`. It is read again for each new connection."""
    store_timeout_s: float = Field(default=5.0, gt=0)
    """How long a request waits for the database before it gets 503. The end of a response waits as long to be stored."""
    usage_dir: str = ""
    """Folder in which an ingress keeps what answers have used until the database has it: a kill of the ingress loses none.
    Empty: next to SQLite's file, or in the system's folder for temporary files."""
    response_store_bytes: int = Field(default=64 << 20, ge=0)
    """What may be kept of each tenant's responses for `previous_response_id` and GET /v1/responses; the oldest make room. 0:
    none. Its conversations may take as much again."""
    response_age_s: float = Field(default=30 * 86400.0, gt=0)
    """After how many seconds a response is deleted, and a conversation that nothing was added to."""
    batch_dir: str = ""
    """Folder of files and batches of releases up to 0.2: what it has is copied into the store when an ingress first starts.
    Without `store`, the store is SQLite in it."""
    batch_dir_bytes: int = Field(default=10 << 30, ge=1 << 20)
    """What files may take of the store before uploads are refused."""
    batch_at_once: int = Field(default=32, ge=1, le=1024)
    """Requests of one tenant's batches that an ingress runs at a time."""
    batch_slo_class: str = "batch"
    """Service class of a batch's requests, where their tenant may use it and they name none themselves."""
    max_connections: int = Field(default=4096, ge=1)
    """Connections that an ingress has at once, as far as it may open files. One more takes the place of one that does nothing, of
    the address that has the most. Where all do something, it is refused."""
    max_connections_per_address: int = Field(default=0, ge=0)
    """Connections of one address (of IPv6: of one /64) at once; 0: as many as there are. Behind a load balancer all have its."""
    body_timeout_s: float = Field(default=30.0, gt=0)
    """A client that has not sent its request's body by then gets 408."""
    keep_alive_s: float = Field(default=25.0, ge=0)
    """A stream that has sent nothing for so long sends a comment, which clients pass over and balancers do not take for idleness.
    What fails later than that, before the first token, is an event of the stream and has no status of its own. 0: never."""
    live_file: str = ""
    """A YAML file with `slo_classes`, `tenants` and `model_limits`, which are added to those here or replace them; each ingress
    reads it again whenever it or a file of keys has changed. A change that is not valid is refused as a whole."""
    tls_cert: str = ""
    """PEM file of the certificate that the ingress shows; it then speaks HTTPS only. Needs `tls_key`."""
    tls_key: str = ""
    """PEM file of the certificate's private key."""
    tls_client_ca: str = ""
    """PEM file of the authority that must have signed every client's certificate; empty: clients need none."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """What is logged at the least."""
    log_format: Literal["text", "json"] = "text"
    """`json`: one object a line, with request ids."""
    otlp_endpoint: str = ""
    """Where the spans of requests go (OTLP over HTTP, e.g. http://collector:4318/v1/traces); empty: nowhere."""
