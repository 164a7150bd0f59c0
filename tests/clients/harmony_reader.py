"""Prints the messages that openai-harmony reads in each turn of a JSON file, a line for each turn."""

import json
import sys
from pathlib import Path

from openai_harmony import HarmonyEncodingName, Role, load_harmony_encoding

encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
for turn in json.loads(Path(sys.argv[1]).read_text()):
    tokens = encoding.encode(turn, allowed_special="all")
    messages = encoding.parse_messages_from_completion_tokens(tokens, Role.ASSISTANT)
    found = [
        {
            "channel": message.channel,
            "recipient": message.recipient,
            "content_type": message.content_type,
            "text": "".join(part.to_dict()["text"] for part in message.content),
        }
        for message in messages
    ]
    print(json.dumps(found))
