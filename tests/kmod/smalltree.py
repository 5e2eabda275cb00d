"""A small driver source written for the tests: the few functions that the hooks look for, and nothing else.

Both shapes of the driver are here, before and from 570, where they differ without effect on the hooks.
"""

from __future__ import annotations

from pathlib import Path

REPLAYABLE = """\
#include "uvm_common.h"
#include "uvm_tools.h"

static NV_STATUS cancel_fault_precise_va({parameters})
{{
    NV_STATUS status;
    {context}

    uvm_tools_record_gpu_fatal_fault(gpu->id, {space}, fault, fault->fatal_reason);

    status = uvm_push_begin_acquire(gpu->channel_manager, MEMOPS, &buffer->replay_tracker, &push, "cancel");
    if (status != NV_OK)
        return status;

    return uvm_push_end_and_wait(&push);
}}

static NV_STATUS translate_instance_ptrs(uvm_gpu_t *gpu, batch_t *batch)
{{
    NvU32 i;

    for (i = 0; i < batch->count; i++) {{
        uvm_fault_buffer_entry_t *current = batch->faults[i];
        NV_STATUS status = look_up(gpu, current);

        if (status == NV_ERR_PAGE_TABLE_NOT_AVAIL) {{
            if (parts_are_enabled(gpu)) {{
                status = push_cancel_on_gpu_targeted(gpu, current->instance_ptr, current->gpc, &tracker);
            }}
            else {{
                status = push_cancel_on_gpu_global(gpu, current->instance_ptr, &tracker);
            }}
        }}
    }}

    return NV_OK;
}}
"""

NON_REPLAYABLE = """\
#include "uvm_common.h"

static void schedule_kill_channel({killer}uvm_fault_buffer_entry_t *fault, uvm_user_channel_t *ended)
{{
    uvm_va_space_t *space = fault->va_space;

    if (ended->kill_channel.scheduled)
        return;

    ended->kill_channel.scheduled = true;
    later(ended, space);
}}

static NV_STATUS {name}(uvm_gpu_t *gpu, uvm_fault_buffer_entry_t *fault)
{{
    NV_STATUS status = NV_OK;

    if (!fault->is_fatal) {{
        status = serve(gpu, fault);

        if (status == NV_OK && !fault->is_fatal) {{
            status = clear_faulted_on_gpu({first}channel, fault, faults->batch_id, &faults->tracker);
            uvm_tracker_clear(&faults->tracker);
        }}
    }}

    return status;
}}
"""

VA_SPACE = """\
#include "uvm_common.h"

NV_STATUS uvm_va_space_create(struct address_space *mapping, uvm_va_space_t **made, NvU64 flags)
{
    uvm_va_space_t *space = allocate();

    *made = NULL;
    if (!space)
        return NV_ERR_NO_MEMORY;

    *made = space;

    return NV_OK;
}

void uvm_va_space_destroy(uvm_va_space_t *space)
{
    LIST_HEAD(later);

    uvm_va_space_stop_all_user_channels(space);
    take_apart(space, &later);
    uvm_deferred_free_object_list(&later);
    release(space);
}

static void destroy_gpu_va_space(uvm_gpu_va_space_t *gpu_space)
{
    unset(gpu_space);

    if (gpu_space->page_tables.root)
        uvm_page_tree_deinit(&gpu_space->page_tables);
}
"""

MODULE = """\
#include "uvm_common.h"

static int uvm_init(void)
{
    int ret = make_devices();

    if (ret != 0)
        goto error;

    return 0;

error:
    return ret;
}

static void uvm_exit(void)
{
    remove_devices();
    uvm_global_exit();
}
"""

KBUILD = 'ccflags-y += -DNV_VERSION_STRING=\\"{version}\\"\n'
BUILD_LIST = "NVIDIA_UVM_SOURCES ?=\nNVIDIA_UVM_SOURCES += nvidia-uvm/uvm.c\n"
PCI = "static int widen(dev_t *dev)\n{\n    return pci_resize_resource(dev, 1, size_of(dev));\n}\n"


def make_tree(root: Path, version: str = "550.163.01", *, newer: bool = False) -> Path:
    """Write the tree below `root` and return it. `newer`: in the shape of drivers from 570 on."""
    replayable = REPLAYABLE.format(
        parameters="fault_t *fault, mode_t mode" if newer else "uvm_gpu_t *gpu, fault_t *fault, mode_t mode",
        context="uvm_gpu_t *gpu = fault->gpu;" if newer else "uvm_push_t push;",
        space="va_space" if newer else "fault->va_space",
    )
    non_replayable = NON_REPLAYABLE.format(
        name="service_fault_once" if newer else "service_fault",
        first="" if newer else "gpu, ",
        killer="" if newer else "uvm_gpu_t *gpu, ",
    )
    texts = {
        "Kbuild": KBUILD.format(version=version),
        "nvidia/nv-pci.c": PCI,
        "nvidia-uvm/nvidia-uvm-sources.Kbuild": BUILD_LIST,
        "nvidia-uvm/uvm_gpu_replayable_faults.c": replayable,
        "nvidia-uvm/uvm_gpu_non_replayable_faults.c": non_replayable,
        "nvidia-uvm/uvm_va_space.c": VA_SPACE,
        "nvidia-uvm/uvm.c": MODULE,
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
