"""What a model's text says, whatever markup its family writes: text, reasoning and tool calls, as it comes."""
