/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * What the hooks in UVM call. Nothing here is called while no fault is fatal, except where address spaces are
 * made and destroyed.
 */
#ifndef MPSD_UVM_H
#define MPSD_UVM_H

#include "uvm_forward_decl.h"
#include "uvm_hal_types.h"

/*
 * True: the fault is answered by a sink, do not cancel it, nor tell the tools of a fatal one. The VA space is
 * locked for reading, the service lock of the GPU's faults is held, no VA block and no RM lock is. `batch`
 * differs between passes over the fault buffer.
 */
bool mpsd_isolate_replayable(uvm_gpu_t *gpu, uvm_va_space_t *va_space, uvm_fault_buffer_entry_t *entry,
			     NvU32 batch);

/* The same for copy engines and PBDMA. */
bool mpsd_isolate_non_replayable(uvm_gpu_t *gpu, uvm_va_space_t *va_space, uvm_fault_buffer_entry_t *entry);

/* UVM gives such a fault back to RM, which ends the channel group: whether it was offered before or not. */
void mpsd_given_back(uvm_gpu_t *gpu, uvm_va_space_t *va_space, uvm_fault_buffer_entry_t *entry);

/* A fault of work whose address space is gone: UVM is about to end its whole channel group. */
void mpsd_orphan(uvm_gpu_t *gpu, uvm_fault_buffer_entry_t *entry);

/* By the process that is to own it, outside of UVM's locks. */
void mpsd_space_created(uvm_va_space_t *va_space);

/* Its channels are stopped; locked for reading, so nothing here waits for the work items. */
void mpsd_space_stopped(uvm_va_space_t *va_space);

/* No fault handler knows it any more; outside of UVM's locks. Waits for the work items. */
void mpsd_space_destroyed(uvm_va_space_t *va_space);

/* Its page directory is unset, its page tables are about to go: takes our references on them back. */
void mpsd_gpu_space_ends(uvm_gpu_va_space_t *gpu_va_space);

/* The device. That it cannot be made is logged, and leaves faults to the module's parameters. */
void mpsd_init(void);
/* When no address space is left. */
void mpsd_exit(void);

#endif
