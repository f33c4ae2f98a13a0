// Headers that engine.inc needs. They stand here because engine.inc is included inside the
// namespace of one instruction set. Nothing that emits a shared inline function may be added: the
// linker keeps one copy of such a function, which could be the one compiled for AVX-512.
#pragma once

#include <cstdint>

#include "../../common/haar.h"
#include "../../common/limits.h"
