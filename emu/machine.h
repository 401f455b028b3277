/* Runs a launch to its end. */
#ifndef EMU_MACHINE_H
#define EMU_MACHINE_H

#include "wave.h"

bool emu_run(struct emu_launch *l); /* false with l->error set when it stopped */

#endif
