/* SPDX-License-Identifier: Apache-2.0
 *
 * What the simulator offers to a test beside the calls of a vendor. A C header: load
 * the functions with dlsym() from the library that simulates the vendor's, and leave
 * them alone when they are not there, which is how to recognise a real one.
 *
 * Profiles, switches, calls and statistics are enumerated by name, so that more of
 * them break nobody. Functions return 0, or 1 for a name or value that is not
 * allowed. All are thread-safe.
 *
 * Environment, read at the first call of any function:
 *   HIPSIM_PROFILE      the profile to start with; the newest when not set. The
 *                       library of the CUDA driver passes over a HIP release
 *   HIPSIM_VRAM_BYTES   memory of each of the eight devices; 8 GiB when not set
 *   HIPSIM_HOST_READS   fault or allow: where the switch host_reads starts
 *   HIPSIM_SWITCHES     where others start: name=value with commas between them. The
 *                       values of stale_memory are clean, as_left and poisoned
 *   GPU_FORCE_BLIT_COPY_SIZE, HSA_ENABLE_SDMA   as in HIP and ROCr
 * After a HIPSIM_ value that makes no sense every call finds no device.
 *
 * A child made by fork() has no device when its parent had a stream, an event or
 * memory: every call says that nothing is initialized, as CUDA does; nothing hangs.
 */
#ifndef HIPSIM_CONTROL_H
#define HIPSIM_CONTROL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What is wrong with the environment; null when nothing is. */
const char* hipsim_environment_error(void);

/* The releases that can be simulated; null past the last. */
const char* hipsim_profile_name(size_t index);

/* The one that is. */
const char* hipsim_profile(void);

/* Waits for the work in flight, then sets the profile (null keeps it) and takes
 * faults, switches, counters, a GPU memory fault and the calling thread's last error
 * back to the start, and invalidates captures. Allocations, streams and events stay. */
int hipsim_reset(const char* profile);

/* The functions that hipsim_fail() knows; null past the last. */
const char* hipsim_call_name(size_t index);

/* The nth call of the function from now on (1: the next) returns `error`, does
 * nothing else, and is counted. */
int hipsim_fail(const char* call, uint64_t nth, int error);

/* Switches; they hold for what is called from now on:
 *   corrupt_loads         not 0: copies from host to device write every byte inverted
 *   copy_latency_us       each copy or batch, and each fill, waits this long, in its
 *                         stream, before a byte moves; an hour at most
 *   fill_latency_us       the same for fills alone
 *   host_device_pointers  not 0: a device knows host memory that is registered by
 *                         another address than the host does
 *   one_mapping_copies    not 0: a copy across the end of a mapping is refused
 *   ignore_address_hints  not 0: a reservation never lies where the caller wished
 *   no_virtual_memory     not 0: the devices have none; they say so, and it cannot be
 *                         reserved or created any more (801)
 *   small_bar             not 0: the devices say that the host reaches a part of their
 *                         memory only; it is reached as before
 *   max_registration_bytes
 *                         the most bytes of host memory that one call registers, what
 *                         is more is out of memory; 0: no limit
 *   max_locked_bytes      the most bytes of host memory that are registered or
 *                         allocated at once in this process, what would be more
 *                         is out of memory; 0: no limit
 *   locked_memory         1: the RLIMIT_MEMLOCK of the process, as it is at each call,
 *                         is such a limit too, for every user; 0: it is not
 *   host_reads            0: the host faults at virtual memory without an access
 *                         descriptor for it; 1: it gets in where a device does
 *   stale_memory          what is in the pages of new memory. 0: zeroes; 1: what their
 *                         last owner left; 2: 0xFF in every byte */
int hipsim_set_switch(const char* name, int64_t value);

struct hipsim_stat {
  char name[64];
  uint64_t value;
};

/* Fills at most `capacity` entries from one moment and returns how many there are.
 *   streams, events, device_allocations, device_bytes, registered_ranges,
 *   registered_bytes, host_allocations, host_allocation_bytes, reservations,
 *   reserved_bytes, handles, handle_bytes, mappings, mapped_bytes, captures, graphs,
 *   executables, imports, imported_bytes
 *                                   live now
 *   batch_calls, batch_copies       accepted
 *   staged_copies, staged_bytes     moved to or from pageable host memory
 *   pitched_copies, pitched_bytes   rectangles and boxes
 *   pitched_packets                 that copy engines took for them
 *   fills, filled_bytes             made
 *   pending_faults                  asked for with hipsim_fail() and not come yet
 *   memory_faults                   on a GPU the process would have died
 *   ipc_exports                     handles given for device memory
 *   ipc_virtual_exports             handles asked for virtual memory, given or not
 *   ipc_failed_imports              handles that could not be opened
 *   copies.E.D, bytes.E.D           moved by engine E (sdma, blit; host: the CPU, for
 *                                   pageable to pageable) in direction D (h2d, d2h,
 *                                   d2d, h2h); a copy is counted once it is made
 *   host_copies.M.D, host_bytes.M.D of those, over the link (h2d, d2h): from or to host
 *                                   memory M (pageable; registered; allocated by the
 *                                   driver)
 *   calls.F                         of function F */
size_t hipsim_stats(struct hipsim_stat* stats, size_t capacity);

/* Queued work is dropped and running work ends early; returns when none runs. Calls
 * still succeed but move nothing. For the end of a process that is about to free
 * memory which a stream may still be copying. */
void hipsim_abandon(void);

#ifdef __cplusplus
}
#endif

#endif
