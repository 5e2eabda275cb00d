// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Sparse PTEs under a faulting address: reads give 0, writes are dropped, nothing faults. They need no memory
 * but that of the page tables, which UVM frees with our references.
 */
#include <linux/delay.h>
#include <linux/slab.h>

#include "uvm_common.h"
#include "uvm_gpu.h"
#include "uvm_hal.h"
#include "uvm_hmm.h"
#include "uvm_map_external.h"
#include "uvm_mmu.h"
#include "uvm_push.h"
#include "uvm_tlb_batch.h"
#include "uvm_va_range.h"
#include "uvm_va_space.h"
#include "mpsd-glue.h"
#include "mpsd-uvm.h"

/* Some 100 ms in all: less than any of RM's own limits. */
#define LOCK_TRIES 400
#define LOCK_PAUSE_US 250

/* Takes what lies beside the address out of the gap; true if the address itself is in it. */
static bool clip(struct mpsd_around *around, u64 address, u64 first, u64 last)
{
	if (last < address)
		around->free_first = max_t(u64, around->free_first, last + 1);
	else if (first > address)
		around->free_last = min_t(u64, around->free_last, first - 1);
	else
		return true;
	return false;
}

static enum mpsd_range kind_of(const uvm_va_range_t *range)
{
	switch (range->type) {
	case UVM_VA_RANGE_TYPE_EXTERNAL:
		return MPSD_RANGE_HOLE;
	case UVM_VA_RANGE_TYPE_MANAGED:
		return MPSD_RANGE_MANAGED;
	case UVM_VA_RANGE_TYPE_CHANNEL:
	case UVM_VA_RANGE_TYPE_SKED_REFLECTED:
	case UVM_VA_RANGE_TYPE_SEMAPHORE_POOL:
		return MPSD_RANGE_PROTECTED;
	default:
		return MPSD_RANGE_UNKNOWN;
	}
}

/*
 * UVM holds this lock over RM calls, and RM may wait for the GPU, and the GPU for this very fault: so it is not
 * waited for without end. Nobody who has it so long lets us know what is mapped.
 */
static bool lock_mappings(uvm_mutex_t *lock)
{
	unsigned int tries;

	for (tries = 0; tries < LOCK_TRIES; tries++) {
		if (uvm_mutex_trylock(lock))
			return true;
		usleep_range(LOCK_PAUSE_US, 2 * LOCK_PAUSE_US);
	}
	return false;
}

/*
 * True if pages smaller than 2 MiB are mapped at the address. From 560 on an external range is a type of its own
 * that begins with the VA range, before that it is the VA range: a pointer without type is both. The lock is the
 * caller's to give back, once the sink is written: what the client maps into the hole comes after it.
 */
static bool look_inside(void *external, uvm_gpu_t *gpu, u64 address, struct mpsd_around *around,
			uvm_mutex_t **locked)
{
	uvm_ext_gpu_range_tree_t *tree = uvm_ext_gpu_range_tree(external, gpu);
	uvm_ext_gpu_map_t *map;
	bool small = false;

	if (!lock_mappings(&tree->lock)) {
		around->range = MPSD_RANGE_UNKNOWN;
		return false;
	}
	*locked = &tree->lock;
	map = uvm_ext_gpu_map_iter_first(external, gpu, around->free_first, around->free_last);
	while (map) {
		if (clip(around, address, map->node.start, map->node.end)) {
			around->range = MPSD_RANGE_MAPPED;
			small = map->pt_range_vec.page_size < MPSD_MAX_SINK_BYTES;
		}
		map = uvm_ext_gpu_map_iter_next(external, map, around->free_last);
	}
	return small;
}

/* In a range the gap ends with it, even where what follows is free. True as above. */
static bool look_at_ranges(uvm_gpu_va_space_t *gpu_va_space, u64 address, struct mpsd_around *around,
			   uvm_mutex_t **locked)
{
	u64 first = around->free_first, last = around->free_last;
	uvm_va_space_t *va_space = gpu_va_space->va_space;
	uvm_va_range_t *range, *holder = NULL;

	for (range = uvm_va_space_iter_first(va_space, first, last); range;
	     range = uvm_va_space_iter_next(range, last)) {
		if (clip(around, address, range->node.start, range->node.end))
			holder = range;
	}
	if (!holder)
		return false;
	around->range = kind_of(holder);
	around->free_first = max_t(u64, around->free_first, holder->node.start);
	around->free_last = min_t(u64, around->free_last, holder->node.end);
	if (around->range != MPSD_RANGE_HOLE)
		return false;
	return look_inside(holder, gpu_va_space->gpu, address, around, locked);
}

static void look_at_sinks(struct mpsd_owner *owner, uvm_gpu_va_space_t *gpu_va_space, u64 address, bool small,
			  struct mpsd_around *around)
{
	struct mpsd_sink_node *node;

	list_for_each_entry(node, &owner->sinks, list) {
		u64 base = node->sink.base;

		if (node->gpu_va_space != gpu_va_space)
			continue;
		if (clip(around, address, base, base + (node->sink.bytes - 1)))
			around->sink = &node->sink;
		/* The oldest, which stays the same. */
		if (small && (base ^ address) < MPSD_MAX_SINK_BYTES)
			around->beside = &node->sink;
	}
}

uvm_mutex_t *mpsd_sink_around(struct mpsd_owner *owner, uvm_gpu_va_space_t *gpu_va_space, u64 address,
			      struct mpsd_around *around)
{
	uvm_mutex_t *locked = NULL;
	u64 within = MPSD_MAX_SINK_BYTES - 1;
	bool small;

	*around = (struct mpsd_around){
		.free_first = address & ~within,
		.free_last = address | within,
		.range = MPSD_RANGE_FREE,
		.hmm = uvm_hmm_is_enabled(gpu_va_space->va_space),
		.ats = gpu_va_space->ats.enabled,
		.alone = !mpsd_has_company(gpu_va_space),
	};
	around->can_address = uvm_gpu_can_address(gpu_va_space->gpu, address & ~(MPSD_PAGE_BYTES - 1),
						  MPSD_PAGE_BYTES);
	small = look_at_ranges(gpu_va_space, address, around, &locked);
	look_at_sinks(owner, gpu_va_space, address, small, around);
	return locked;
}

static NvU64 sparse_pte(uvm_page_table_range_vec_t *ptes, NvU64 offset, void *tree)
{
	return ((uvm_page_tree_t *)tree)->hal->make_sparse_pte();
}

/* Of one of 2 MiB. The TLBs may know its addresses as invalid at each page size. */
static NV_STATUS write_entry(uvm_page_tree_t *tree, uvm_page_table_range_t *entry, u64 base)
{
	uvm_push_t push;
	NV_STATUS status;

	status = uvm_push_begin_acquire(tree->gpu->channel_manager, UVM_CHANNEL_TYPE_MEMOPS, &tree->tracker, &push,
					"mpsd: tables at 0x%llx", base);
	if (status != NV_OK)
		return status;
	uvm_page_tree_write_pde(tree, entry, &push);
	tree->gpu->parent->host_hal->wait_for_idle(&push);
	uvm_tlb_batch_single_invalidate(tree, &push, base, MPSD_MAX_SINK_BYTES,
					tree->hal->page_sizes() & (2 * MPSD_MAX_SINK_BYTES - 1), UVM_MEMBAR_NONE);
	return uvm_push_end_and_wait(&push);
}

/*
 * A page of 2 MiB takes the place of the entry that points to the tables of smaller ones, and leaves nothing there
 * when it goes; UVM writes the entry with a new table only. The tree's lock: UVM may write the same entry, and what
 * comes later must be what is newer.
 */
static NV_STATUS link_tables(uvm_page_tree_t *tree, u64 address)
{
	u64 base = address & ~(MPSD_MAX_SINK_BYTES - 1);
	uvm_page_table_range_t entry = { 0 };
	NV_STATUS status;

	status = uvm_page_tree_get_entry(tree, MPSD_MAX_SINK_BYTES, base, UVM_PMM_ALLOC_FLAGS_EVICT, &entry);
	if (status != NV_OK)
		return status;
	uvm_mutex_lock(&tree->lock);
	status = write_entry(tree, &entry, base);
	uvm_mutex_unlock(&tree->lock);
	uvm_page_tree_put_ptes(tree, &entry);
	return status;
}

static void unmake(struct mpsd_sink_node *node)
{
	if (node->ptes) {
		uvm_page_table_range_vec_clear_ptes(node->ptes, UVM_MEMBAR_NONE);
		uvm_page_table_range_vec_destroy(node->ptes);
	}
	kfree(node);
}

static NV_STATUS write_sink(struct mpsd_sink_node *node)
{
	uvm_page_tree_t *tree = &node->gpu_va_space->page_tables;
	NV_STATUS status;

	status = uvm_page_table_range_vec_write_ptes(node->ptes, UVM_MEMBAR_NONE, sparse_pte, tree);
	return status == NV_OK ? link_tables(tree, node->sink.base) : status;
}

static NV_STATUS create_sink(struct mpsd_sink_node *node)
{
	uvm_page_tree_t *tree = &node->gpu_va_space->page_tables;
	u64 sizes = node->page_bytes | MPSD_MAX_SINK_BYTES;
	NV_STATUS status;

	if (!tree->hal->make_sparse_pte || (tree->hal->page_sizes() & sizes) != sizes)
		return NV_ERR_NOT_SUPPORTED;
	status = uvm_page_table_range_vec_create(tree, node->sink.base, node->sink.bytes, node->page_bytes,
						 UVM_PMM_ALLOC_FLAGS_EVICT, &node->ptes);
	if (status != NV_OK) {
		node->ptes = NULL;
		return status;
	}
	return write_sink(node);
}

NV_STATUS mpsd_sink_make(uvm_gpu_va_space_t *gpu_va_space, const struct mpsd_decision *decision,
			 struct mpsd_sink_node **made)
{
	struct mpsd_sink_node *node = kzalloc(sizeof(*node), GFP_KERNEL);
	NV_STATUS status;

	if (!node)
		return NV_ERR_NO_MEMORY;
	node->gpu_va_space = gpu_va_space;
	node->sink = (struct mpsd_sink){ .base = decision->base, .bytes = decision->bytes };
	node->page_bytes = decision->page_bytes;
	status = create_sink(node);
	if (status == NV_OK)
		*made = node;
	else
		unmake(node);
	return status;
}

NV_STATUS mpsd_sink_renew(struct mpsd_sink *sink)
{
	return write_sink(container_of(sink, struct mpsd_sink_node, sink));
}

NV_STATUS mpsd_sink_relink(uvm_gpu_va_space_t *gpu_va_space, u64 address)
{
	return link_tables(&gpu_va_space->page_tables, address);
}

void mpsd_gpu_space_ends(uvm_gpu_va_space_t *gpu_va_space)
{
	struct mpsd_owner *owner = mpsd_owner_get(gpu_va_space->va_space);
	struct mpsd_sink_node *node, *next;

	if (!owner)
		return;
	mutex_lock(&owner->lock);
	list_for_each_entry_safe(node, next, &owner->sinks, list) {
		if (node->gpu_va_space == gpu_va_space) {
			list_del(&node->list);
			unmake(node);
		}
	}
	mutex_unlock(&owner->lock);
	mpsd_owner_put(owner);
}
