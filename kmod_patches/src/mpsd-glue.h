/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* What the glue's files share. Decisions are mpsd-policy.c's. */
#ifndef MPSD_GLUE_H
#define MPSD_GLUE_H

#include <linux/kref.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/pid.h>
#include <linux/workqueue.h>

#include "uvm_forward_decl.h"
#include "uvm_hal_types.h"
#include "uvm_lock.h"
#include "mpsd-policy.h"

/* The VA space's own, and that of the process's memory: UVM allows one of each. */
#define MPSD_HELD_FILES 2

/*
 * A VA space as we know it. `lock` serializes all calls of the policy for it. Order of locks: UVM's VA space
 * lock, `lock`, UVM's external range tree lock and all after it; the table's and the ring's lock are leaves.
 */
struct mpsd_owner {
	struct hlist_node node;
	struct kref references;
	struct mutex lock;
	uvm_va_space_t *va_space;
	u64 id;
	u64 start_ns;
	struct pid *pid;
	char comm[MPSD_COMM_BYTES];
	struct mpsd_space policy;
	struct list_head sinks;
	struct delayed_work steps;
	struct file *held[MPSD_HELD_FILES];
	const void *acknowledged_by;
	bool ended;			/* `steps` is not queued any more */
};

/* One sink: on one GPU, in force until that GPU's address space ends. */
struct mpsd_sink_node {
	struct list_head list;
	struct mpsd_sink sink;
	u64 page_bytes;
	uvm_gpu_va_space_t *gpu_va_space;
	uvm_page_table_range_vec_t *ptes;
};

/* mpsd-owners.c: each get is paired with a put. */
struct mpsd_owner *mpsd_owner_get(uvm_va_space_t *va_space);
struct mpsd_owner *mpsd_owner_get_by_id(u64 id);
void mpsd_owner_put(struct mpsd_owner *owner);
/* Who acknowledged has closed the file. */
void mpsd_owners_abandon(const void *reader);

/* mpsd-steps.c: `lock` is held. */
void mpsd_steps_arm(struct mpsd_owner *owner);
void mpsd_steps_work(struct work_struct *work);

/* mpsd-sink.c: `lock` is held, and the VA space is locked for reading. */
/* What it returns, unless that is NULL, is locked, and the caller's to unlock: until then nothing is mapped there. */
uvm_mutex_t *mpsd_sink_around(struct mpsd_owner *owner, uvm_gpu_va_space_t *gpu_va_space, u64 address,
			      struct mpsd_around *around);
NV_STATUS mpsd_sink_make(uvm_gpu_va_space_t *gpu_va_space, const struct mpsd_decision *decision,
			 struct mpsd_sink_node **made);
/* Of a sink that is in force, after its PTEs were lost: writes them where they are, with none missing meanwhile. */
NV_STATUS mpsd_sink_renew(struct mpsd_sink *sink);
/* Of an address in the same 2 MiB as a sink: what points to the tables there is written again. */
NV_STATUS mpsd_sink_relink(uvm_gpu_va_space_t *gpu_va_space, u64 address);

/* mpsd-company.c: the VA space is locked for reading. True if a fault of it can harm another one. */
bool mpsd_has_company(uvm_gpu_va_space_t *gpu_va_space);

/* mpsd-device.c */
struct mpsd_policy_params mpsd_params(void);
/* Puts a record, with the process's name in it; `owner` is NULL for an orphan's. */
void mpsd_report(struct mpsd_owner *owner, struct mpsd_record *record);
/* The clock of records and deadlines. */
u64 mpsd_now_ns(void);

#endif
