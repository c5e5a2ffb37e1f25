"""Resources that a run would need of an accelerator that this machine lacks. Experimental."""
