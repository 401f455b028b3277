/* Live device allocations: device addresses are host addresses, and an access must lie inside one registered range. */
#ifndef EMU_MEMORY_H
#define EMU_MEMORY_H

#include <stdint.h>

void emu_mem_rdlock(void);
void emu_mem_unlock(void);
bool emu_mem_add(uint64_t base, uint64_t bytes, bool writable);
bool emu_mem_remove(uint64_t base);
/* finds the live allocation that holds addr; caller holds the lock */
bool emu_mem_find(uint64_t addr, uint64_t *lo, uint64_t *hi, bool *writable);

#endif
