"""The form of request bodies: classes of fields, decoding, and what several APIs share."""
