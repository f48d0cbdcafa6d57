// Arrays of millions of entries, on huge pages if Linux has them. With small pages, random access misses the TLB, and
// the kernel spends more time on page faults than the loops take.

#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

template <typename T> struct LargePages {
    using value_type = T;
    static constexpr size_t PAGE = size_t{1} << 21;

    LargePages() = default;
    template <typename U> LargePages(const LargePages<U> &) {}

    T *allocate(size_t count) {
        const size_t nbytes = count * sizeof(T), rounded = (nbytes + PAGE - 1) / PAGE * PAGE;
        void *memory = nbytes < PAGE ? std::malloc(nbytes) : std::aligned_alloc(PAGE, rounded);
        if (!memory)
            throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
        if (nbytes >= PAGE)
            madvise(memory, rounded, MADV_HUGEPAGE); // if it fails, pages are small
#endif
        return static_cast<T *>(memory);
    }
    void deallocate(T *memory, size_t) { std::free(memory); }
    template <typename U> bool operator==(const LargePages<U> &) const { return true; }
};

template <typename T> using LargeArray = std::vector<T, LargePages<T>>;
