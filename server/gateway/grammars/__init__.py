"""From the fields that say what an answer must look like to grammars that nodes compile."""
