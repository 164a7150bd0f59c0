"""Ollama's own Python client at a server that pulls: `URL NAME`."""

import sys

from ollama import Client, ResponseError

client, name = Client(sys.argv[1]), sys.argv[2]
parts = list(client.pull(name, stream=True))
print([part.status for part in parts if not part.digest])
print({part.digest: (part.completed, part.total) for part in parts if part.digest and part.total > 1000})
print(client.pull(name).status, client.delete(name).status)
for refused in (client.delete, client.pull):
    try:
        refused("org/none")
    except ResponseError as error:
        print(error.status_code, error.error[:34])
