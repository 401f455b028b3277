/* Memory accesses in flight: each is issued, lands (bytes move) and retires (a wait ends "in flight"). Landing comes
 * at issue (early) or when a wait forces it (late); both keep the order of the counter that tracks the access. */
#ifndef EMU_FLIGHT_H
#define EMU_FLIGHT_H

#include "wave.h"

/* the slot of an access that is issued; emu_commit puts it in flight, and gives true */
struct emu_pend *emu_push(struct emu_wave *w, struct emu_queue *q, const struct emu_inst *i, enum emu_pkind kind);
bool emu_commit(struct emu_wave *w, struct emu_queue *q);
void emu_retire_vm(struct emu_wave *w, unsigned left);
void emu_retire_lgkm(struct emu_wave *w, unsigned left);
static inline uint32_t emu_dma_step(const struct emu_pend *p) { return p->bytes == 4 ? 4 : 16; }

#endif
