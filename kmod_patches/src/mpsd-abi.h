/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * /dev/nvidia-uvm-mpsd: what a program reads from it and asks of it. This header is the only
 * description; kernel and user space compile it, other languages compare themselves with it.
 *
 * open() needs CAP_SYS_ADMIN. Every open file reads from the oldest record that is kept on, at its own
 * pace: read() returns as many whole records as fit (EINVAL if not one does; EAGAIN if there is none and
 * the file is non-blocking), poll() says POLLIN when there is one. MPSD_RING_RECORDS are kept; who reads
 * too late sees it in `seq`, which counts by one.
 *
 * Fields only ever join at the end of a record, in place of `reserved`, with a new version. Numbers are
 * of the machine's byte order. Times are CLOCK_MONOTONIC_RAW in ns if nothing else is said.
 */
#ifndef MPSD_ABI_H
#define MPSD_ABI_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define MPSD_ABI_VERSION 1
#define MPSD_DEVICE_NAME "nvidia-uvm-mpsd"
#define MPSD_RING_RECORDS 256

#define MPSD_COMM_BYTES 16
#define MPSD_UUID_BYTES 16
#define MPSD_DRIVER_BYTES 32

/* In place of a channel, and of a GPC or VEID, that the fault does not tell. */
#define MPSD_NO_CHANNEL 0xffffffffU
#define MPSD_NO_ID 0xffffU

enum mpsd_mode {
	MPSD_MODE_OFF = 0,		/* the stock driver */
	MPSD_MODE_REPORT = 1,		/* faults are recorded, the stock driver answers them */
	MPSD_MODE_ISOLATE = 2,
};

enum mpsd_action {
	MPSD_ACTION_NONE = 0,		/* never in a record */
	/* A fault of the space: */
	MPSD_ACTION_REPORTED = 1,	/* stock answer; `why` is 0 if mode isolate would have sunk it */
	MPSD_ACTION_SUNK = 2,		/* [sink_base, sink_base + sink_bytes) reads 0 and drops writes */
	MPSD_ACTION_SUNK_BEFORE = 3,	/* an earlier sink covers it; never in a record */
	MPSD_ACTION_REFUSED = 4,	/* stock answer, for the reason in `why` */
	/* A step that was taken against a condemned space that nobody dealt with; `why` is 0, or FAILED: */
	MPSD_ACTION_KILL = 16,		/* its UVM files are held, its process gets SIGKILL; FAILED: it has none */
	MPSD_ACTION_STOP = 17,		/* its channels are stopped: no queued work starts; FAILED: no file is held */
	MPSD_ACTION_GIVE_UP = 18,	/* nothing of it is sunk any more, its files are let go */
	/* Work whose address space is gone has faulted: the channel group dies now. No process is known. */
	MPSD_ACTION_ORPHAN = 32,
};

/* Why the stock driver answers a fault. */
enum mpsd_why {
	MPSD_WHY_NONE = 0,
	MPSD_WHY_FAULT_TYPE = 1,	/* no mapping helps against this type */
	MPSD_WHY_ACCESS = 2,		/* not a read, write or atomic */
	MPSD_WHY_REASON = 3,		/* UVM gave up for another reason than the address */
	MPSD_WHY_PERMISSIONS = 4,	/* something is mapped there that does not allow the access */
	MPSD_WHY_MANAGED = 5,		/* managed memory keeps its own account of page tables */
	MPSD_WHY_PROTECTED = 6,		/* buffers that context switches use */
	MPSD_WHY_RANGE = 7,		/* a kind of range that is not known to be safe */
	MPSD_WHY_CLIENT = 8,		/* not an SM (replayable), copy engine or host (non-replayable) */
	MPSD_WHY_NONREPLAYABLE = 9,	/* isolation of these is switched off */
	MPSD_WHY_ATS = 10,		/* the CPU's page tables answer for this space */
	MPSD_WHY_UNADDRESSABLE = 11,	/* the GPU's page tables do not reach there */
	MPSD_WHY_NO_GAP = 12,		/* the free gap does not hold the page */
	MPSD_WHY_LOOP = 13,		/* an earlier sink of this page did not help */
	MPSD_WHY_TOO_MANY = 14,		/* the space has all the sinks it may have */
	MPSD_WHY_RELEASED = 15,		/* user space, or the last step, ended the sinking */
	MPSD_WHY_FAILED = 16,		/* the sink could not be made, or the step not be taken */
	MPSD_WHY_ALONE = 17,		/* nobody else's work is in its channel group: nobody else is harmed */
	MPSD_WHY_COUNT
};

/* UVM's numbers, as its tools interface gives them (drivers 535 to 595). 0 is unknown. */
enum mpsd_fault_type {
	MPSD_FAULT_INVALID_PDE = 1,
	MPSD_FAULT_INVALID_PTE = 2,
	MPSD_FAULT_WRITE = 3,
	MPSD_FAULT_ATOMIC = 4,
	/* From here on no mapping helps. */
	MPSD_FAULT_PDE_SIZE = 5,
	MPSD_FAULT_VA_LIMIT = 6,
	MPSD_FAULT_UNBOUND_INSTANCE = 7,
	MPSD_FAULT_PRIVILEGE = 8,
	MPSD_FAULT_PITCH = 9,
	MPSD_FAULT_WORK_CREATION = 10,
	MPSD_FAULT_APERTURE = 11,
	MPSD_FAULT_COMPRESSION = 12,
	MPSD_FAULT_KIND = 13,
	MPSD_FAULT_REGION = 14,
	MPSD_FAULT_POISON = 15,
	MPSD_FAULT_CC = 16,
};

enum mpsd_access {
	MPSD_ACCESS_READ = 1,
	MPSD_ACCESS_WRITE = 2,
	MPSD_ACCESS_ATOMIC = 3,
	MPSD_ACCESS_PREFETCH = 4,
};

enum mpsd_uvm_reason {
	MPSD_REASON_INVALID_ADDRESS = 1,
	MPSD_REASON_PERMISSIONS = 2,
	MPSD_REASON_FAULT_TYPE = 3,
	MPSD_REASON_OUT_OF_MEMORY = 4,
	MPSD_REASON_INTERNAL = 5,
	MPSD_REASON_INVALID_OPERATION = 6,
};

enum mpsd_client_type {
	MPSD_CLIENT_GPC = 1,
	MPSD_CLIENT_HUB = 2,
};

/* Numbers of our own. */
enum mpsd_engine {
	MPSD_ENGINE_GRAPHICS = 1,	/* compute too */
	MPSD_ENGINE_HOST = 2,		/* PBDMA: semaphores, push buffers */
	MPSD_ENGINE_CE = 3,
};

#define MPSD_FLAG_REPLAYABLE 0x1U
#define MPSD_FLAG_CONDEMNED 0x2U	/* results of this client are wrong from now on: it must go */
#define MPSD_FLAG_ACKNOWLEDGED 0x4U
#define MPSD_FLAG_RELEASED 0x8U

/*
 * A storm of faults does not push the records of others out: of the faults of a space that end in the
 * same way the 1st, 2nd, 4th, 8th ... have a record, and `faults` and `sinks` count them all.
 */
struct mpsd_record {
	__u16 version;			/* MPSD_ABI_VERSION */
	__u16 size;			/* of this record in bytes */
	__u8 action;			/* enum mpsd_action */
	__u8 why;			/* enum mpsd_why */
	__u8 mode;			/* enum mpsd_mode at that time */
	__u8 fault_type;		/* enum mpsd_fault_type; 0 in a step, like all that tells of a fault */
	__u64 seq;			/* from 1 since the module was loaded */
	__u64 time_ns;
	__u64 space;			/* names the address space, is never used again; 0: not known */
	__u64 address;			/* the GPU's virtual address as the fault tells it */
	__u64 sink_base;		/* 0 with sink_bytes 0: no sink was made */
	__u64 sink_bytes;
	__u64 start_ns;			/* when the process started, CLOCK_BOOTTIME: with pid, who it is */
	__u64 deadline_ns;		/* when the next step comes; 0: none will */
	__s32 pid;			/* who made the space, as the reader's pid namespace sees it; 0: not */
	__u32 faults;			/* fatal ones of the space, this one too; of an orphan: that GPU's so far */
	__u32 sinks;			/* sinks of the space, this one included */
	__u32 channel;
	__u8 access;			/* enum mpsd_access */
	__u8 uvm_reason;		/* enum mpsd_uvm_reason */
	__u8 engine;			/* enum mpsd_engine */
	__u8 client_type;		/* enum mpsd_client_type */
	__u16 client;			/* the hardware's number of the unit that faulted */
	__u16 gpc;
	__u16 veid;
	__u16 flags;			/* MPSD_FLAG_* */
	__u32 reserved0;		/* 0 */
	__u8 gpu_uuid[MPSD_UUID_BYTES];
	char comm[MPSD_COMM_BYTES];	/* ends with 0 */
	__u64 reserved[3];		/* 0 */
};

/* Of every version the same: it is what tells the version. */
struct mpsd_query {
	__u32 abi_version;
	__u32 record_size;
	__u32 ring_records;
	__u32 mode;			/* enum mpsd_mode */
	__u32 deadline_ms;
	__u32 max_sinks;		/* of one space */
	__u32 nonreplayable;		/* 1: faults of copy engines and of the host are isolated too */
	__u32 stop_channels;		/* 1: MPSD_ACTION_STOP is one of the steps */
	__u64 written;			/* records since the module was loaded */
	__u64 loaded_ns;		/* CLOCK_BOOTTIME: another value means that `seq` began again */
	char driver[MPSD_DRIVER_BYTES];	/* version, ends with 0 */
	__u64 reserved[4];		/* 0 */
};

struct mpsd_set_mode {
	__u32 mode;			/* enum mpsd_mode */
	__u32 reserved;			/* must be 0 */
};

struct mpsd_target {
	__u64 space;			/* of a record */
	__u64 reserved;			/* must be 0 */
};

#define MPSD_IOC_MAGIC 0xec
/*
 * EINVAL: a reserved field is not 0, or no such mode. ENOENT: the space is gone.
 * EPERM: the space has done nothing (acknowledge, kill: only a condemned one is killed).
 * EALREADY: the first step was taken or asked for, or the space ends (acknowledge, kill); another file has
 * acknowledged.
 */
#define MPSD_IOC_QUERY _IOR(MPSD_IOC_MAGIC, 0, struct mpsd_query)
#define MPSD_IOC_SET_MODE _IOW(MPSD_IOC_MAGIC, 1, struct mpsd_set_mode)
/*
 * "I evict this one." The steps wait ten times as long, counted from its first sink. Closing the file
 * takes this back: then the steps come one deadline after that.
 */
#define MPSD_IOC_ACKNOWLEDGE _IOW(MPSD_IOC_MAGIC, 2, struct mpsd_target)
/* The first step, now. */
#define MPSD_IOC_KILL _IOW(MPSD_IOC_MAGIC, 3, struct mpsd_target)
/* Nothing of this space is sunk any more, for ever; what is sunk stays. The steps come all the same. */
#define MPSD_IOC_RELEASE _IOW(MPSD_IOC_MAGIC, 4, struct mpsd_target)

_Static_assert(sizeof(struct mpsd_record) == 160, "a record has one size everywhere");
_Static_assert(sizeof(struct mpsd_query) == 112, "an answer has one size everywhere");

#endif
