// The emulator's runtime: compiled once, loaded globally; the shared objects of emitted sources
// find their helpers and hooks here.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>

#include "abi.h"
#include "fibers.h"
#include "state.h"
#include "races.h"
#include "hooks.h"
#include "scheduler.h"
#include "warp.h"
#include "bulk.h"
#include "signals.h"
#include "launch.h"
