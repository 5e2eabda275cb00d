/* SPDX-License-Identifier: GPL-2.0 OR MIT */
#ifndef MPSD_GPU_H
#define MPSD_GPU_H

/*
 * A GPU in software, as much of one as nvidia-uvm looks at: Turing's classes, video memory, copy
 * engine channels that a kernel thread runs, fault buffers. There is one, GPU_UUID names it.
 */
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/spinlock.h>
#include <linux/types.h>

#include "nv_uvm_interface.h"

#include "../stub.h"

/* A field of a hardware header, which says "high:low". */
#define FIELD_HIGH(field) (1 ? field)
#define FIELD_LOW(field) (0 ? field)
#define FIELD_MASK(field) (~0ull >> (63 - FIELD_HIGH(field) + FIELD_LOW(field)))
#define FIELD_OF(value, field) (((u64)(value) >> FIELD_LOW(field)) & FIELD_MASK(field))

#define GPU_VIDMEM_BYTES (64ull << 20)
#define GPU_BIG_PAGE (64u << 10)
#define GPU_SUBCONTEXTS 64
#define GPU_CHUNK (2ull << 20)

/* Bits of a page table entry. A sparse one is not valid, but volatile. */
#define GPU_PTE_VALID (1ull << 0)
#define GPU_PTE_VOLATILE (1ull << 3)
#define GPU_PTE_READ_ONLY (1ull << 6)
#define GPU_PTE_NO_ATOMICS (1ull << 7)

/* An address space of RM's: UVM's own, or a duplicate of a client's. */
struct gpu_space {
	struct list_head node;
	u32 client, object;		/* of the client that it was duplicated from; 0: UVM's own */
	bool set;			/* a page directory is set */
	bool sysmem;
	u64 directory;
};

/* What UVM pushed that somebody may ask about; kept in order, the oldest are dropped. */
enum gpu_deed {
	GPU_INVALIDATE,			/* address, page directory */
	GPU_REPLAY,			/* which of the two kinds */
	GPU_CANCEL_VA,			/* address, page directory, engine, access */
	GPU_CANCEL_INSTANCE,		/* address: of the instance block */
	GPU_CLEAR_FAULTED,		/* the method's word */
	GPU_REPORTED,			/* a non-replayable fault given back: its address */
	GPU_STOPPED,			/* a channel: its number */
	GPU_TROUBLE,			/* the emulation does not know this: see the kernel's log */
	GPU_WENT_ON,			/* a client's access: its address, the entry that allows it, its level, sparse? */
	GPU_WALKED,			/* address, the entry found, its level, big page tables or small */
	GPU_FAULTED,			/* a packet was written: address, 0, the engine, replayable? */
	GPU_DIGESTED,			/* page tables: a number that all of them make, entries that say something */
};

void gpu_did(enum gpu_deed deed, u64 address, u64 directory, u32 first, u32 second);

/*
 * memory.c. Where the copy engine or a page walk finds `bytes`; NULL where nothing is. A virtual address
 * is one of RM's, or one that UVM has mapped for itself: then `bytes` must not leave the 4 KiB page.
 */
void *gpu_virtual(u64 address, u64 bytes);
void *gpu_physical(u64 address, bool sysmem, u64 bytes);
void *gpu_allocate(u64 bytes, u64 alignment, u64 *address);
void gpu_release(u64 address);
int gpu_memory_open(void);
void gpu_memory_close(void);

/* spaces.c. What takes no lock itself wants this one held. */
extern struct list_head gpu_spaces;
extern struct mutex gpu_spaces_lock;
/* Where a client's access is looked up; NULL: nowhere. `hub`: the VEID does not count. */
const struct gpu_space *gpu_space_of(u32 channel, u32 veid, bool hub);
bool gpu_channel_known(u32 channel);
bool gpu_same_group(u64 instance, u64 other);
/* UVM's own. */
const struct gpu_space *gpu_space_internal(void);

/* channels.c */
struct gpu_channel;
int gpu_channels_open(void);
void gpu_channels_close(void);

/* engine.c: true if anything was done. Called by one thread only. */
bool gpu_run(struct gpu_channel *channel);

struct gpu_channel {
	struct list_head node;
	u64 entries_va, words_va;	/* allocations: ring, and the words below */
	u64 *entries;
	u32 count, get;
	volatile u32 *words;		/* gp_get, gp_put, doorbell, token */
	NvNotification notifier;
	u64 at;				/* the next word of the segment that is being run */
	u32 left;			/* words left in it */
	u32 method, methods;		/* of the header that is being run: next, how many more */
	u32 subchannel;
	bool increments;
	u32 host[64], sw[64], copy[0x500];
};

enum gpu_word { GPU_GET, GPU_PUT, GPU_DOORBELL, GPU_TOKEN, GPU_WORDS };

/* faults.c */
int gpu_faults_open(void);
void gpu_faults_close(void);
void gpu_faults_interrupt(void);
void gpu_faults_mask(bool mask);

struct gpu_fault {
	u64 address, instance, timestamp;
	u32 engine, type, access, client, gpc;
	bool hub, replayable;
	bool stubborn;			/* faults whatever the page tables say, until it is cancelled */
};

/* Writes a packet. 0, or -ENOSPC: the buffer is full; -ENODEV: UVM has not asked for faults. */
int gpu_fault(const struct gpu_fault *fault);

/* accesses.c: an access of a client that stands still, and what ends that. */
int gpu_access(const struct gpu_fault *fault, u32 channel);
void gpu_accesses_replay(void);
/* Those that found the fault buffer full. */
void gpu_accesses_unsent(void);
void gpu_accesses_resume(u32 channel);
void gpu_accesses_cancel_address(u64 address, u64 directory, u32 engine);
void gpu_accesses_cancel_group(u64 instance);
void gpu_accesses_drop(u64 address);
/* Takes a channel out of the list that it is in, and ends its accesses. */
void gpu_accesses_end(u32 channel, struct list_head *node);
void gpu_accesses_close(void);
u32 gpu_accesses_standing(void);

/* walk.c: what the page tables below a directory say of an address; see there. */
struct gpu_walk {
	u64 pte;
	u32 level;			/* of the entry: 0 4 KiB, 1 64 KiB, 2 2 MiB, 3 and up directories */
};

int gpu_walk(const struct gpu_space *space, u64 address, bool big, struct gpu_walk *found);
/* False: nothing is mapped there. */
bool gpu_translate(const struct gpu_space *space, u64 address, u64 *physical, bool *sysmem);

/* One number made of every entry that says something, and how many there are. */
int gpu_digest(const struct gpu_space *space, u64 *number, u32 *count);

/* external.c */
void gpu_channel_resource(const void *descriptor, UvmGpuChannelInstanceInfo *info);

/* failing.c */
int gpu_failing_open(void);
void gpu_failing_close(void);

/* device.c */
extern const NvProcessorUuid gpu_uuid;

/* spaces.c: instance blocks lie in video memory as far as anybody can tell; nobody reads them. */
#define GPU_INSTANCE(channel) (0x1000ull * (0x100 + (channel)))

/* control.c */
int gpu_control_open(void);
void gpu_control_close(void);

/* ../session.c */
const struct UvmOpsUvmEvents *mpsd_stub_callbacks(void);

#endif
