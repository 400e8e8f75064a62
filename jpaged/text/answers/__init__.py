"""What a model writes: thoughts, content and tool calls, told apart while the text grows."""
