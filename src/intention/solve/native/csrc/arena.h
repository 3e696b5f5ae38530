// Scratch memory of one thread: taken piece by piece, given back all at once.
#pragma once

#include <cstdlib>
#include <cstring>

#include "vector.h"

namespace INTENTION_ARCH {

class Arena {
  public:
    ~Arena() {
        reset();
        std::free(base);
    }

    // Gives everything back; what did not fit the last time will fit the next time.
    void reset() {
        while (overflow) {
            Piece* next = overflow->next;
            std::free(overflow);
            overflow = next;
        }
        if (wanted > capacity) {
            std::free(base);
            capacity = wanted + wanted / 4;
            base = static_cast<char*>(std::aligned_alloc(ALIGNED, (capacity + ALIGNED - 1) / ALIGNED * ALIGNED));
            if (!base) capacity = 0;
        }
        used = wanted = 0;
    }

    // Of nothing too there is a piece: memset and memcpy must not get a null pointer.
    template <class T>
    T* take(Int count) {
        const std::size_t bytes = (std::size_t(larger<Int>(count, 1)) * sizeof(T) + ALIGNED - 1) / ALIGNED * ALIGNED;
        wanted += bytes;
        if (used + bytes <= capacity) {
            used += bytes;
            return reinterpret_cast<T*>(base + used - bytes);
        }
        Piece* piece = static_cast<Piece*>(std::aligned_alloc(ALIGNED, bytes + ALIGNED));
        if (!piece) std::abort();
        piece->next = overflow;
        overflow = piece;
        return reinterpret_cast<T*>(reinterpret_cast<char*>(piece) + ALIGNED);
    }

    template <class T>
    T* zeros(Int count) {
        T* p = take<T>(count);
        std::memset(p, 0, std::size_t(count) * sizeof(T));
        return p;
    }

  private:
    static constexpr std::size_t ALIGNED = 64;
    struct Piece {
        Piece* next;
    };
    char* base = nullptr;
    std::size_t capacity = 0, used = 0, wanted = 0;
    Piece* overflow = nullptr;
};

}  // namespace INTENTION_ARCH
