"""Programs that use mxfp8_moe as a user would."""
