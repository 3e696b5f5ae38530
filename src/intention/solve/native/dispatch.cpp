// What the library tells of itself: the version of its interface, and the instruction set that this processor gets.

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

const char *choose() {
#ifdef INTENTION_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("fma"))
        return "avx512";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
    return "baseline";
}

}  // namespace

// Raised with every change of an exported signature; library.py loads no other.
EXPORTED int intention_native_abi(void) { return 1; }

EXPORTED const char *intention_native_arch(void) {
    static const char *const chosen = choose();
    return chosen;
}
