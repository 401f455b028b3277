/* What silicon leaves undefined: registers in flight, missing wait states, races through LDS (check.c) and through
 * memory (race.c). False where they stop. */
#ifndef EMU_CHECK_H
#define EMU_CHECK_H

#include "wave.h"

bool emu_check(struct emu_wave *w, const struct emu_inst *i);
void emu_track_writes(struct emu_wave *w, const struct emu_inst *i);
enum emu_lds_kind { LDS_READ, LDS_WRITE, LDS_DMA };
bool emu_lds_issue(struct emu_wave *w, enum emu_lds_kind kind, uint32_t addr, unsigned bytes, int lane);
void emu_lds_retire(struct emu_wave *w, enum emu_lds_kind kind, uint32_t addr, unsigned bytes);
void emu_lds_remark(struct emu_wave *w); /* at a barrier: what is in flight stays unordered */

struct emu_races;
struct emu_races *emu_races_new(void); /* of one launch */
void emu_races_free(struct emu_races *r);
bool emu_race_scalar(struct emu_wave *w, uint64_t addr, size_t bytes); /* a load */
bool emu_race_lanes(struct emu_wave *w, const struct emu_pend *p);     /* loads or stores, at issue */
void emu_race_barrier(struct emu_wave *w); /* stores in flight at a barrier are not ordered by it */

#endif
